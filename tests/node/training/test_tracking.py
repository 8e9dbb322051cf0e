"""A node's measurements in the event log and as curves in TensorBoard; the error if TensorBoard is not installed."""

import sys

import pytest

from ftis_node.cli.app import run
from ftis_node.learner.messages import StepReport
from ftis_node.telemetry.status import EvalStatus
from tests.node.support import RunningNode
from tests.small_swarm import EVAL_EVERY_STEPS


@pytest.mark.timeout(600)
def test_a_nodes_curves_equal_its_event_log(small_swarm):
    node = small_swarm.ann
    node.wait_for(lambda: len(curve(node, "learner/loss")) == len(node.events("step")), timeout_s=20)
    reports, evaluations = recorded(node, "step", StepReport), recorded(node, "eval", EvalStatus)
    for name in ("loss", "reward_mean", "grad_norm", "tokens_per_s", "num_tokens"):
        assert curve(node, f"learner/{name}") == [(one["step"], pytest.approx(one[name])) for one in reports]
    for one in reports:
        assert one["completion_tokens"] > 0 and 0 <= one["cut_fraction"] <= 1 and 0 <= one["no_signal_fraction"] <= 1
        assert one["entropy"] > 0 and one["kl_to_start"] is None
    assert reports[0]["kl_from_start"] is None and reports[1]["kl_from_start"] > 0
    assert all(one["completion_tokens"] > 0 and 0 <= one["cut_fraction"] <= 1 for one in evaluations)
    steps = [report["step"] for report in reports]
    assert steps == list(range(1, len(steps) + 1))
    assert curve(node, "eval/arithmetic/pass_at_1") == [
        (one["step"], pytest.approx(one["pass_at_1"])) for one in evaluations
    ]
    assert [one["step"] for one in evaluations] == [0, *steps[EVAL_EVERY_STEPS - 1 :: EVAL_EVERY_STEPS]]
    assert curve(node, "swarm/groups_sent")[-1][0] == steps[-1]
    assert len(curve(node, "generation/tokens_per_s")) == len(steps)


def curve(node: RunningNode, name: str) -> list[tuple[int, float]]:
    """Return steps and values as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(node.home / "tensorboard"))
    shown.Reload()
    return [(entry.step, entry.value) for entry in shown.Scalars(name)]


def recorded(node: RunningNode, name: str, record: type[StepReport | EvalStatus]) -> list[dict[str, float]]:
    """Return the events of a name. Each has all fields of the record, and the generator's speed or the duration."""
    events = node.events(name)
    additional = "generation_tokens_per_s" if name == "step" else "duration_s"
    for event in events:
        assert set(event) == {"time", "event", *record.__struct_fields__, additional}
        assert event[additional] >= 0
    return events


def test_a_missing_tracker_is_refused_before_the_model_is_resolved(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    home = str(tmp_path / "home")
    assert run(["join", "--model", "org/missing", "--home", home, "--track", "tensorboard"]) == 2
    assert capsys.readouterr().err == (
        "ftis-node: the tracker 'tensorboard' is not installed: pip install tensorboard, "
        "or remove it from tracking.to\n"
    )
