"""The grid of an experiment: which trials there are, and that all are fair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftis_node.config.delay import Delay
from ftis_node.config.manifest import load_manifest
from ftis_node.config.workers import LoraSection
from ftis_node.errors import UsageError
from ftis_node.lab.experiment.pairs import Pair, TrialMember, resolve_pair
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.lab.experiment.trial import _settings
from ftis_node.lab.experiment.trial_matrix import Experiment, _given, parse_method

PAIR = Pair("size", (TrialMember("s", "/models/s"), TrialMember("m", "/models/m")))
EXPERIMENT = Experiment(
    base=load_manifest("arithmetic-compare"),
    pairs=(PAIR,),
    methods=("ftis",),
    task_spec="arithmetic",
    eval_specs=("arithmetic",),
    steps=4,
    seeds=range(2),
    lora_adapter=LoraSection(),
)


@pytest.mark.parametrize(
    ("share", "num_nodes"), [("vertical", 2), ("vertical", 4), ("vertical", 8), ("horizontal", 2), ("horizontal", 4)]
)
def test_every_update_takes_the_same_number_of_completions(share: str, num_nodes: int) -> None:
    experiment = replace(EXPERIMENT, shares=(share,), num_nodes=(num_nodes,))
    for trial in experiment.trials():
        step, group_size = trial.manifest.step, trial.manifest.sampling.group_size
        assert len(trial.members) == num_nodes
        assert (step.own_groups + step.foreign_groups) * group_size == 256
        assert step.own_groups * group_size == 256 // num_nodes  # what a node generates itself


def test_alone_generates_all_and_there_is_one_for_each_model() -> None:
    experiment = replace(EXPERIMENT, methods=("alone", "ftis"), num_nodes=(2, 4), lies=("none", "rewards"))
    alone = [trial for trial in experiment.trials() if trial.labels["method"] == "alone"]
    assert [(trial.members[0].name, trial.seed) for trial in alone] == [("s", 0), ("m", 0), ("s", 1), ("m", 1)]
    assert {(t.manifest.step.own_groups, t.manifest.step.foreign_groups) for t in alone} == {(32, 0)}
    assert len(experiment.trials()) == 4 + 2 * 2 * 2  # of the swarms: nodes x lies x seeds


def test_a_sapo_split_is_of_groups_and_draws() -> None:
    (trial,) = replace(EXPERIMENT, shares=("sapo:2/6",), num_nodes=(8,), seeds=range(1)).trials()
    step = trial.manifest.step
    assert (step.own_groups, step.foreign_groups, step.group_selection) == (2, 6, "sapo")


@pytest.mark.parametrize(("share", "foreign"), [("newest:4", 4), ("useful:4", 4), ("useful", 28), ("useful:28", 28)])
def test_a_choice_takes_some_of_what_is_made_as_in_the_vertical_split(share: str, foreign: int) -> None:
    (trial,) = replace(EXPERIMENT, shares=(share,), num_nodes=(8,), seeds=range(1)).trials()
    step = trial.manifest.step
    assert (step.own_groups, step.foreign_groups, step.group_selection) == (4, foreign, share.partition(":")[0])


def test_a_divided_swarm_is_a_vertical_one_whose_controls_divide_nothing() -> None:
    experiment = replace(EXPERIMENT, shares=("vertical", "divided"), methods=("alone:own", "ftis"), seeds=range(1))
    steps = {
        (trial.labels["method"], trial.labels["share"]): trial.manifest.step.model_dump()
        for trial in experiment.trials()
    }
    vertical = steps["ftis", "vertical"]
    assert steps["ftis", "divided"] == vertical | {"task_allocation": "advantage"}
    assert vertical["task_allocation"] == "even"
    assert {share for method, share in steps if method == "alone:own"} == {"vertical"}, "one control for both"
    assert steps["alone:own", "vertical"]["task_allocation"] == "even"


def test_the_last_node_is_the_liar() -> None:
    (trial,) = replace(EXPERIMENT, lies=("positives",), num_nodes=(4,), seeds=range(1)).trials()
    assert [member.lie for member in trial.members] == [None, None, None, "positives"]
    assert [member.name for member in trial.members] == ["s", "m", "s~2", "liar"]


def test_only_the_last_node_is_late_where_the_delay_is_its_own() -> None:
    experiment = replace(EXPERIMENT, num_nodes=(2, 4), delays=("fixed:8", "fixed:8@peer"), seeds=range(1))
    found = [(trial.delay, [(m.name, m.delay) for m in trial.members]) for trial in experiment.trials()]
    late, names = Delay(8, 8), ("s", "m", "s~2", "m~2")
    assert found[:2] == [(late, [(name, None) for name in names[:nodes]]) for nodes in (2, 4)]
    assert found[2:] == [
        (NO_DELAY, [("s", None), ("m", late)]),
        (NO_DELAY, [("s", None), ("m", None), ("s~2", None), ("m@late", late)]),
    ]
    trial = experiment.trials()[2]
    assert [trial.delay_of(member) for member in trial.members] == [NO_DELAY, late]


def test_a_node_without_peers_is_not_late_where_a_peer_is_and_runs_once() -> None:
    delays = ("fixed:4@peer", "none", "fixed:8@peer", "fixed:8")
    trials = replace(EXPERIMENT, delays=delays, methods=("alone", "alone:own"), seeds=range(1)).trials()
    found = [(trial.labels["method"], trial.members[0].name, trial.labels["delay"], trial.delay) for trial in trials]
    assert sorted(found, key=str) == [
        (method, name, *delay)
        for method in ("alone", "alone:own")
        for name in ("m", "s")
        for delay in (("fixed:8", Delay(8, 8)), ("none", NO_DELAY))
    ]
    undelayed = replace(EXPERIMENT, methods=("alone",), seeds=range(1)).trials()
    assert {trial.key for trial in undelayed} < {trial.key for trial in trials}


def test_what_a_member_does_not_say_is_no_part_of_its_trials_key() -> None:
    assert set(_given(TrialMember("s", "/models/s"))) == {"name", "model", "lora", "lie"}
    late = TrialMember("s", "/models/s", delay=Delay(8, 8))
    assert _given(late)["delay"] == {"least": 8, "most": 8, "unit": "steps"}


def test_a_codec_is_allowed_by_the_trials_manifest_and_set_in_its_nodes() -> None:
    exact, lossy = replace(EXPERIMENT, codecs=("exact", "lossy"), seeds=range(1)).trials()
    assert [trial.manifest.wire.codecs for trial in (exact, lossy)] == [
        ("exact", "lossless"),
        ("exact", "lossless", "lossy"),
    ]
    assert [_settings(trial, trial.members[0]).swarm.codec for trial in (exact, lossy)] == ["exact", "lossy"]
    assert exact.key != lossy.key
    with pytest.raises(UsageError, match="no codec 'zip'"):
        replace(EXPERIMENT, codecs=("zip",)).trials()


def test_a_key_follows_from_what_decides_the_outcome() -> None:
    keys = {trial.key for trial in EXPERIMENT.trials()}
    assert len(keys) == 2
    assert {trial.key for trial in replace(EXPERIMENT, steps=5).trials()}.isdisjoint(keys)
    assert {trial.key for trial in replace(EXPERIMENT, delays=("fixed:2",)).trials()}.isdisjoint(keys)
    assert {trial.key for trial in replace(EXPERIMENT, methods=("ftis", "tis")).trials()} > keys


def test_methods_take_parameters_and_the_filter_of_the_base() -> None:
    base = EXPERIMENT.base.method
    assert parse_method("ftis", base).given() == {"kl_estimator": "rkl_iw", "kl_threshold": 0.03}
    assert parse_method("tis:cap=3", base).given() == {"cap": 3.0}
    given = parse_method("f-vis:kl_estimator=author_k3:kl_threshold=5", base).given()
    assert given == {"kl_estimator": "author_k3", "kl_threshold": 5.0}
    of_base = {"kl_estimator": "rkl_iw", "kl_threshold": 0.03}
    assert parse_method("ftis:filter=ess", base).given() == of_base | {"filter": "ess"}
    assert parse_method("f-nois:filter=quantile:keep_share=.5", base).given() == of_base | {
        "filter": "quantile",
        "keep_share": 0.5,
    }
    assert parse_method("tis:floor=0.25", base).given() == {"floor": 0.25}
    chosen = base.model_copy(update={"filter": "quantile", "keep_share": 0.4})
    assert parse_method("f-vis", chosen).given() == of_base | {"filter": "quantile", "keep_share": 0.4}
    assert parse_method("gepo:clip=false:alpha=0.1", base).given() == {"clip": False, "alpha": 0.1}


@pytest.mark.parametrize(
    "text",
    [
        "ppo",
        "ftis:cap",
        "ftis:clip=1",
        "ftis:cap=-1",
        "gspo:mis_low=1",
        "ftis:filter=far",
        "ftis:sender_ids=1",
        "ftis:keep_share=0.5",
        "tis:filter=ess",
        "tis:floor=2",
        "tis:floor=1:cap=0.5",
    ],
)
def test_a_wrong_method_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_method(text, EXPERIMENT.base.method)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nodes": (5,)},  # 32 prompts
        {"shares": ("horizontal",), "num_nodes": (3,)},
        {"shares": ("horizontal",), "num_nodes": (8,)},  # groups of one
        {"shares": ("diagonal",)},
        {"shares": ("sapo:0/0",)},
        {"shares": ("sapo:0/8",)},
        {"shares": ("useful:17",)},  # the other makes 16
        {"shares": ("newest:4",), "num_nodes": (5,)},
        {"shares": ("useful:",)},
        {"lies": ("murder",)},
        {"delays": ("later",)},
        {"delays": ("fixed:0@peer",)},
        {"delays": ("later@peer",), "methods": ("alone",)},
        {"delays": ("fixed:8@peer",), "lies": ("none", "rewards")},
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(UsageError):
        replace(EXPERIMENT, **changes).trials()  # type: ignore[arg-type]


def test_pairings_by_name_and_by_folder(tmp_path) -> None:  # type: ignore[no-untyped-def]
    peft = resolve_pair("peft", tmp_path, seed=0)
    assert [(member.name, member.lora) for member in peft.members] == [("full", False), ("lora", True)]
    assert peft.members[0].model == peft.members[1].model
    given = resolve_pair("/a/small,/b/large:lora,/c/small", tmp_path, seed=0)
    assert [(member.name, member.model, member.lora) for member in given.members] == [
        ("small", "/a/small", False),
        ("large-lora", "/b/large", True),
        ("small#2", "/c/small", False),
    ]
    with pytest.raises(UsageError, match="no pairing 'sice'"):
        resolve_pair("sice", tmp_path, seed=0)
