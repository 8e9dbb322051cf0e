"""A swarm and its controls: their trials, their groups and updates, and differences computed by hand."""

from dataclasses import replace

import pytest

from ftis_node.errors import UsageError
from ftis_node.lab.experiment.report import (
    at_equal_tokens,
    best_control,
    controls_table,
    copies_note,
    paired_difference,
    worth,
)
from ftis_node.lab.experiment.specs import BaselineSpec, parse_alone
from ftis_node.lab.experiment.summary import final_accuracy, series_of
from ftis_node.lab.experiment.trial_matrix import Experiment
from tests.conftest import with_sections
from tests.lab.experiment.test_summary import member, result
from tests.lab.experiment.test_trial_matrix import EXPERIMENT


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("alone", BaselineSpec(own=False, updates=None, method="grpo")),
        ("alone:own", BaselineSpec(own=True, updates=None, method="grpo")),
        ("alone:own:updates=4", BaselineSpec(own=True, updates=4, method="grpo")),
        ("alone:gepo:clip=false", BaselineSpec(own=False, updates=None, method="gepo:clip=false")),
        ("alone:own:updates=2:ftis:cap=3", BaselineSpec(own=True, updates=2, method="ftis:cap=3")),
    ],
)
def test_the_name_of_a_baseline_is_parsed(text, meaning):
    assert parse_alone(text) == meaning


@pytest.mark.parametrize("text", ["alone:updates=0", "alone:updates=65", "alone:own:updates=x"])
def test_an_invalid_number_of_updates_is_refused(text):
    with pytest.raises(UsageError, match="updates is a number from 1 to 64"):
        parse_alone(text)


def steps_of(experiment: Experiment) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Return own groups, foreign groups and updates per batch, by method and number of nodes."""
    found = {}
    for trial in experiment.trials():
        step, updates = trial.manifest.step, trial.manifest.optimizer.updates_per_batch
        place = (trial.labels["method"], trial.labels["nodes"])
        found[place] = (step.own_groups, step.foreign_groups, updates)
    return found


def test_the_controls_generate_what_a_node_of_the_swarm_generates():
    experiment = replace(EXPERIMENT, num_nodes=(2, 8), seeds=range(1), controls=True)
    assert steps_of(experiment) == {
        ("alone", 1): (32, 0, 1),
        **{("alone:own", nodes): (32 // nodes, 0, 1) for nodes in (2, 8)},
        **{("alone:own:updates=2", nodes): (32 // nodes, 0, 2) for nodes in (2, 8)},
        **{("alone:own:updates=4", nodes): (32 // nodes, 0, 4) for nodes in (2, 8)},
        **{("ftis", nodes): (32 // nodes, 32 - 32 // nodes, 1) for nodes in (2, 8)},
    }


def test_the_controls_contain_the_runs_number_of_updates_once():
    twice = with_sections(EXPERIMENT.base, optimizer={"updates_per_batch": 2})
    found = steps_of(replace(EXPERIMENT, base=twice, num_nodes=(2,), seeds=range(1), controls=True))
    updates = {method: updates for (method, _), (_, _, updates) in found.items() if method.startswith("alone:own")}
    assert updates == {"alone:own": 2, "alone:own:updates=1": 1, "alone:own:updates=4": 4}
    assert found["ftis", 2] == (16, 16, 2)


def swarm_of(seeds: dict[tuple[int, int], float], method: str, **labels: object) -> list:  # type: ignore[type-arg]
    """Return results of a model with these final accuracies, by (model seed, seed)."""
    return [
        result(method, seed, member("s", [0.0, end / 2, end], tokens_a_step=50), model_seed=model_seed, **labels)
        for (model_seed, seed), end in seeds.items()
    ]


ENDS = {(0, 0): 0.5, (0, 1): 0.7, (1, 0): 0.8, (1, 1): 0.8}  # means by model: 0.6 and 0.8


def test_the_standard_error_is_over_models_if_there_are_several():
    (line,) = series_of(swarm_of(ENDS, "ftis"))
    assert str(line.final("sums")) == "0.700 ± 0.100"
    (one,) = series_of(swarm_of({(0, 0): 0.5, (0, 1): 0.7}, "ftis"))
    assert str(one.final("sums")) == "0.600 ± 0.100"


def test_differences_are_paired_by_run():
    ours = swarm_of(ENDS, "ftis")
    theirs = swarm_of({seeds: end - 0.1 - 0.1 * seeds[0] for seeds, end in ENDS.items()}, "alone:own")
    swarm, control = series_of([*ours, *theirs])
    found = paired_difference(swarm, control, final_accuracy("sums"))
    assert found is not None  # 0.1 for one model and 0.2 for the other; t with one degree of freedom is 12.706
    assert str(found) == "+0.150 ± 0.050 [-0.485, +0.785]"
    (others,) = series_of(swarm_of({(7, 7): 0.5}, "nois"))
    assert paired_difference(swarm, others, final_accuracy("sums")) is None


def test_alone_is_compared_at_the_own_tokens_of_the_swarm():
    alone = [result("alone", 0, member("s", [0.0, 0.4, 0.6], tokens_a_step=100), nodes=1)]
    swarm = [result("ftis", 0, member("s", [0.0, 0.5, 0.7], tokens_a_step=75))]
    lines = series_of([*alone, *swarm])
    # the node has generated 1,500 tokens in 20 steps; `alone` is then between 0.4 and 0.6
    assert str(at_equal_tokens(lines, lines[-1], "sums")) == "+0.200"
    assert at_equal_tokens(lines[1:], lines[-1], "sums") is None


def test_copies_with_one_curve_are_named():
    curve = [0.0, 0.5]
    twins = result("ftis", 0, *(member(name, curve, tokens_a_step=1) for name in ("s", "s~2", "m")))
    note = "All copies have the same curve, so they are one policy:\n\n- size ftis s\n"
    assert copies_note(series_of([twins]), "sums") == note
    apart = result("ftis", 1, member("s", curve, tokens_a_step=1), member("s~2", [0.0, 0.6], tokens_a_step=1))
    assert copies_note(series_of([twins, apart]), "sums") == "", "in one run they differ"


def test_the_best_control_and_the_worth_of_a_foreign_group():
    results = [
        *swarm_of({(0, 0): 0.9}, "alone", nodes=1),
        *swarm_of({(0, 0): 0.5}, "alone:own"),
        *swarm_of({(0, 0): 0.6}, "alone:own:updates=2"),
        *swarm_of({(0, 0): 0.8}, "alone:own", nodes=4),  # of another swarm
        *swarm_of({(0, 0): 0.8}, "ftis"),
    ]
    lines = series_of(results)
    control = best_control(lines, lines[-1], "sums")
    assert control is not None and control.labels["method"] == "alone:own:updates=2"
    # a curve's mean is 0.75 of its end; the gain is 0.3 of the 0.4 that own groups give
    assert worth(lines, lines[-1], "sums") == pytest.approx(0.75)
    table = controls_table(lines, "sums").splitlines()
    assert len(table) == 3
    # the trials of `swarm_of` generate as much in all, so `alone` has its last accuracy
    assert "| s | alone:own:updates=2 nodes=2 | +0.200 | +0.150 | 0.75 | -0.100 |" in table[2]
    assert controls_table(series_of(results[-1:]), "sums") == ""
    late = series_of([*results[:-1], *swarm_of({(0, 0): 0.8}, "ftis", delay="fixed:8@peer")])
    control = best_control(late, late[-1], "sums")
    assert control is not None and control.labels["method"] == "alone:own:updates=2", "no node is late in a control"
    assert worth(late, late[-1], "sums") == pytest.approx(0.75)
