"""Domain experts at equal compute: the arms, a small experiment with models, its tables, and its continuation."""

import asyncio
import csv
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.config.manifest import load_manifest
from ftis_node.config.workers import LoraSection
from ftis_node.errors import UsageError
from ftis_node.evaluation.ensemble import MODES
from ftis_node.evaluation.model_answers import answers_of
from ftis_node.generation.evaluate import summarize
from ftis_node.lab.experiment import trial as trial_module
from ftis_node.lab.experiment.runner import options_of
from ftis_node.lab.experiment.trial import Trial, run_trial
from ftis_node.lab.experiment.trial_matrix import Experiment
from ftis_node.lab.experiment.trial_result import Evaluation, MemberResult, TrialResult
from ftis_node.lab.hdee import (
    ONE,
    THREE_PARTS,
    ExpertStart,
    arms_of,
    hdee_trials,
    planned_steps,
    read_domains,
    starts_of,
)
from ftis_node.lab.hdee_report import cells_of, differences_table
from ftis_node.lab.tiny import make_tiny
from ftis_node.lab.tiny_curricula import RECIPES
from tests.conftest import with_sections

DOMAINS = read_domains(THREE_PARTS)
SPECS = DOMAINS.held_out
EXPERTS = [domain.expert for domain in DOMAINS.trained]
EXPERIMENT = Experiment(
    base=load_manifest("arithmetic-hdee"), pairs=(), methods=("alone", "ftis"), task_spec=str(DOMAINS.mixture),
    eval_specs=SPECS, steps=40, seeds=range(2), lora_adapter=LoraSection(),
)  # fmt: skip
MODELS = Path("/models")
STARTS = starts_of("hdee", DOMAINS, MODELS, seed=0)
FEW_STEPS = 2


def trials(experiment: Experiment = EXPERIMENT) -> list[Trial]:
    return hdee_trials(experiment, DOMAINS, STARTS, model_seed=0)


def size_of(model: str) -> str:
    return Path(model).name.split("-")[1]


def planned_compute(trial: Trial) -> float:
    """Return the compute of a trial by the formula of its result, if all groups have as many tokens."""
    total = 0.0
    for index, member in enumerate(trial.members):
        parameters = RECIPES[size_of(member.model)].num_parameters  # type: ignore[index]  # a size
        rounds = trial.rounds([member] if trial.apart else trial.members)
        steps = range(1, trial.last_step(trial.members[index]) + 1)
        shares = [rounds.shares(step) for step in steps]
        total += parameters * sum(6 * (own + foreign) + 2 * own for own, foreign in shares)
    return total


@pytest.mark.parametrize("usual", [12, 40])
def test_the_four_arms_cost_the_same(usual):
    for method, arms in (("alone", 4), ("ftis", 3)):
        made = trials(replace(EXPERIMENT, methods=(method,), steps=usual))
        found = {trial.labels["arm"]: planned_compute(trial) for trial in made}
        assert len(found) == arms
        assert max(found.values()) / min(found.values()) < 1.03


def test_each_arm_varies_steps_or_sizes_as_its_name():
    arms = arms_of(DOMAINS, STARTS)
    steps = {name: planned_steps(arms, name, 40, is_apart=True) for name in arms}
    assert steps == {"equal": (40, 40, 40), "steps": (20, 40, 60), "sizes": (40, 40, 40), "one": (120,)}
    assert planned_steps(arms, "steps", 40, is_apart=False) == (19, 38, 57)  # remaining members generate more
    sizes = [start.parameters for start in arms["sizes"].starts]
    assert sizes == sorted(sizes)
    assert arms["equal"].starts == arms["steps"].starts == (STARTS[1],) * 3


def test_the_arms_of_any_mixture_follow_its_order_its_weights_and_the_given_models():
    domains = read_domains("sums+arithmetic:add=3+words:1=2", "words:2+sums:long")
    assert [domain.expert for domain in domains.trained] == ["sums", "arithmetic-add", "words-1"]
    assert domains.held_out == ("sums", "arithmetic:add", "words:1", "words:2", "sums:long")
    assert str(domains.mixture) == "arithmetic:add=3+sums+words:1=2"
    assert domains.preset == "words-ftis", "the part with the longest answers"
    sizes = {"s": 1, "m": 2, "l": 9}
    small, middle, large = (ExpertStart(f"/{name}", size, lora=size > 1) for name, size in sizes.items())
    arms = arms_of(domains, [small, middle, large])
    assert arms["equal"].starts == (middle,) * 3
    assert planned_steps(arms, "steps", 20, is_apart=True) == (10, 30, 20), "by the weights"
    assert planned_steps(arms, "sizes", 20, is_apart=True) == (10, 10, 10), "half: 12 instead of 6 parameters"
    assert list(arms_of(domains, [small])) == ["equal", "steps", "one"], "one size"
    found = hdee_trials(EXPERIMENT, domains, [small, middle, large], model_seed=0)
    starts = {(member.model, member.lora) for trial in found for member in trial.members}
    assert starts == {("/s", False), ("/m", True), ("/l", True)}
    unlike = hdee_trials(EXPERIMENT, domains, [small, replace(middle, tokenizer="x"), large], model_seed=0)
    modes = {t.labels["arm"]: t.final_evaluation.modes for t in unlike if t.final_evaluation is not None}
    assert modes == {"equal": MODES, "steps": MODES, "sizes": ("vote", "confidence")}


@pytest.mark.parametrize(
    ("task", "excluded", "trained", "test"),
    [
        ("arithmetic:add+arithmetic:sub", "arithmetic:borrow", "sub", "borrow"),
        ("arithmetic:add+sums", "sums:long+arithmetic:no-carry", "add", "no-carry"),
        ("arithmetic:medium+arithmetic:carry", None, "medium", "carry"),
    ],
)
def test_a_domain_whose_test_problems_another_one_trains_on_is_refused(task, excluded, trained, test):
    with pytest.raises(UsageError, match=f"^arithmetic:{trained} trains on test problems of arithmetic:{test}: name"):
        read_domains(task, excluded)


def test_one_is_compared_at_equal_compute_updates_and_time():
    """Two experts share. The curve of `one` is linear, so the places of comparison can be computed by hand."""
    domains = read_domains("arithmetic:add+arithmetic:sub", "sums")
    tasks = ("arithmetic:add", "arithmetic:sub", "sums")

    def member(name, steps, gains, *, own, foreign):
        def point(step, task, gain):
            return Evaluation(step, task, gain * step, 100, None, own * step, foreign * step)

        points = [point(step, task, gain) for step in (0, steps) for task, gain in zip(tasks, gains, strict=True)]
        figures: dict[str, list[float | None]] = {"grad_norm": [1.0] * steps}
        tokens = (own * steps, (own + foreign) * steps)
        return MemberResult(name, name, 1000, 1000, 0, 0, 0, {}, points, figures, None, *tokens)

    def trial(arm, method, *members):
        return TrialResult("", {"arm": arm, "method": method}, {}, 0, 0, list(members), 0.0)

    # A token costs 8 if it is own, 6 if it is foreign. `one`: 80 an update; a sharing expert: 40 + 30 = 70.
    one = trial(ONE, "alone", member(ONE, 20, (0.01, 0.03, 0.002), own=10, foreign=0))
    add = member("arithmetic-add", 10, (0.05, 0.0, 0.001), own=5, foreign=5)
    sub = member("arithmetic-sub", 8, (0.0, 0.1, 0.004), own=5, foreign=5)
    table = differences_table(cells_of(domains, [one, trial("steps", "ftis", add, sub)]))
    own, best = [row.split(" | ") for row in table.splitlines()[2:]]
    # ends: own 0.5 and 0.8, one 0.2 and 0.6; after 10 and 8 updates 0.1 and 0.24; the slowest has 10 * 70 / 80 updates
    assert own[:7] == ["| steps", "ftis", "own expert", "+0.250", "+0.480", "+0.475", "-"]
    assert best[6] == "-0.008", "excluded: 0.032 and 0.04"


def test_every_arm_has_a_trial_alone_and_one_in_a_swarm_except_the_single_model():
    found = [(t.labels["arm"], t.labels["method"], t.seed) for t in trials()]
    assert len(found) == len(set(map(options_of, trials()))) == 7 * 2
    assert [place for place in found if place[0] == ONE] == [(ONE, "alone", 0), (ONE, "alone", 1)]
    for trial in trials():
        assert trial.apart == (trial.labels["method"] == "alone")
        if trial.labels["arm"] != "one":
            assert [member.domain for member in trial.members] == [domain.spec for domain in DOMAINS.trained]
    (one,) = {t.members for t in trials() if t.labels["arm"] == "one"}
    assert (one[0].domain, one[0].steps) == (None, 120)


def test_a_number_of_prompts_that_is_not_divisible_is_refused():
    with pytest.raises(UsageError, match="multiple of 6"):
        trials(replace(EXPERIMENT, base=with_sections(EXPERIMENT.base, step={"own_groups": 9, "foreign_groups": 0})))


def small(models: dict[str, Path]) -> Trial:
    """Return a trial of three experts, of which one leaves after the first step and one after the second."""
    groups, evaluation = {"own_groups": 2, "foreign_groups": 4}, {"every_steps": 1, "limit": 8}
    base = with_sections(EXPERIMENT.base, step=groups, eval=evaluation)
    experiment = replace(EXPERIMENT, base=base, methods=("ftis",), steps=FEW_STEPS, seeds=range(1))
    (trial,) = (t for t in trials(experiment) if t.labels["arm"] == "steps")
    sizes = (models["s"], models["m"], models["s"])
    members = tuple(replace(m, model=str(path)) for m, path in zip(trial.members, sizes, strict=True))
    return replace(trial, members=members)


@pytest.mark.timeout(240)
def test_experts_exchange_groups_until_they_leave_and_are_evaluated_as_ensembles(tiny_models, tmp_path, monkeypatch):
    kept: dict[str, Path] = {}
    export = trial_module.InProcessLearner.export

    def keeping(self, out):
        export(self, out)  # type: ignore[arg-type]
        kept[out.name] = Path(shutil.copytree(out, tmp_path / out.name))

    monkeypatch.setattr(trial_module.InProcessLearner, "export", keeping)
    result = run_trial(small(tiny_models))
    easy, medium, hard = result.members
    assert [member.domain for member in result.members] == list(SPECS)
    assert [len(member.steps["grad_norm"]) for member in result.members] == [1, 2, 3]
    assert [(member.own_groups, member.foreign_groups) for member in result.members] == [(2, 4), (5, 7), (11, 7)]
    for member in result.members:
        assert not member.refused
        assert all(norm is not None and norm > 0 for norm in member.steps["grad_norm"])
        assert member.compute == member.parameters * (6 * member.tokens_trained + 2 * member.tokens_generated)
        for task in SPECS:
            assert [point.step for point in member.curve(task)] == list(range(len(member.steps["grad_norm"]) + 1))
    own = [member.tokens_generated for member in result.members]
    assert all(11 * 8 >= tokens / 8 > 0 for tokens in own)
    assert easy.tokens_trained == easy.curve(SPECS[0])[-1].tokens_generated + easy.curve(SPECS[0])[-1].tokens_received
    assert hard.curve(SPECS[0])[-1].tokens_received == hard.tokens_trained - hard.tokens_generated
    assert {(each.task, each.mode) for each in result.final_evaluation} == set(itertools.product(SPECS, MODES))
    assert all(each.n == 8 and 0 <= each.pass_at_1 <= 1 for each in result.final_evaluation)
    asked = answers_of([str(kept[hard.name])], SPECS[2], limit=8, k=1, max_tokens=96, engine="torch")
    (answered,) = asyncio.run(asked)
    assert summarize(answered, k=1).pass_at_1 == hard.curve(SPECS[2])[-1].pass_at_1, "another model is evaluated"


@pytest.mark.timeout(240)
def test_experts_that_train_alone_exchange_no_groups(tiny_models):
    trial = small(tiny_models)
    manifest = with_sections(trial.manifest, step={"own_groups": 6, "foreign_groups": 0})
    result = run_trial(replace(trial, manifest=manifest, apart=True, final_evaluation=None))
    assert [(member.own_groups, member.foreign_groups) for member in result.members] == [(6, 0), (12, 0), (18, 0)]
    assert [member.tokens_trained for member in result.members] == [m.tokens_generated for m in result.members]
    assert not result.final_evaluation


@pytest.mark.timeout(1200)
def test_the_command_writes_its_tables_and_keeps_finished_trials(tmp_path, capsys):
    for size in RECIPES:
        make_tiny(size, tmp_path / "models" / f"graded-{size}-0", scale=0.1, graded=True, mistake=10)
    command = [*"compare --pair hdee --steps 2 --prompts 6 --eval-every 2 --out".split(), str(tmp_path)]
    assert run([*command, "--seeds", "1"]) == 0
    printed = capsys.readouterr()
    assert "same compute" in printed.err
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert (len(times), run([*command, "--seeds", "2"])) == (7, 0)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    table = capsys.readouterr().out
    assert table.strip() == (tmp_path / "table.md").read_text().strip()
    assert table.count("| own expert |") == 12
    assert table.count("| ensemble, posterior |") == 12  # its accuracy, and its difference to the single model
    assert "| one | apart | the model |" in table
    assert "±" in table
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert {row["pair"] for row in rows} == {f"hdee:{arm}" for arm in arms_of(DOMAINS, STARTS)}
    assert {row["task"] for row in rows} == set(SPECS)
    assert {row["model"] for row in rows} == {*EXPERTS, "one"}
    document = json.loads((tmp_path / "results.json").read_bytes())
    assert len(document["trials"]) == 14
    for name in ("curves.png", "arms.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
