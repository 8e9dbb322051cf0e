"""A node's figures, whole in the event trail and as curves in TensorBoard; refused where that is not installed."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ftis_node.learner.messages import StepReport
from ftis_node.telemetry.status import EvalStatus
from tests.node.support import ANY_PORT, RunningNode, started, write_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

START_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_nodes_curves_are_its_event_trail(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home, run = tmp_path / "node", write_manifest(tmp_path / "run.toml", patience_s=0.5)
    for steps in (2, 3):
        arguments = ("--run", str(run), "--listen", ANY_PORT, "--track", "tensorboard", "--steps", str(steps))
        with started(home, "join", "--model", str(tiny_models["s"]), *arguments) as node:
            assert node.wait(timeout_s=START_S) == 0, node.log.read_text()[-3000:]
    counts = [event["tracked"]["tensorboard"] for event in node.events("stop")]
    # Two steps with evaluations of steps 0 and 2; then a step and an evaluation, because it is the last one.
    assert counts == [{"written": 4, "failed": 0, "dropped": 0}, {"written": 2, "failed": 0, "dropped": 0}]

    shown = EventAccumulator(str(home / "tensorboard"))
    shown.Reload()

    def curve(name: str) -> list[tuple[int, float]]:
        return [(entry.step, entry.value) for entry in shown.Scalars(name)]

    reports = _events(node, "step", StepReport)
    for name in ("loss", "reward_mean", "grad_norm", "tokens_per_s", "num_tokens"):
        assert curve(f"learner/{name}") == [(report["step"], pytest.approx(report[name])) for report in reports]
    assert [step for step, _ in curve("learner/loss")] == [1, 2, 3]
    evaluations = _events(node, "eval", EvalStatus)
    assert curve("eval/arithmetic/pass_at_1") == [(one["step"], pytest.approx(one["pass_at_1"])) for one in evaluations]
    assert [evaluation["step"] for evaluation in evaluations] == [0, 2, 3]
    assert curve("swarm/groups_sent")[-1][0] == 3
    assert len(curve("generation/tokens_per_s")) == 3


def _events(node: RunningNode, name: str, record: type[StepReport | EvalStatus]) -> list[dict[str, float]]:
    """The events of a name, which have every field of the record, and of a step the generator's speed beside it."""
    events = node.events(name)
    for event in events:
        beside = {"generation_tokens_per_s"} if name == "step" else set()
        assert set(event) == {"time", "event", *record.__struct_fields__} | beside
    return events


WITHOUT_TENSORBOARD = """
import sys
sys.modules["tensorboard"] = None
from ftis_node.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


def test_a_tracker_that_is_not_installed_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    arguments = (
        "join",
        "--model",
        "nobody/nothing",
        "--home",
        str(tmp_path / "home"),
        "--track",
        "tensorboard",
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORBOARD, *arguments], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 2
    assert done.stderr == (
        "ftis-node: the tracker 'tensorboard' is not installed: pip install tensorboard, "
        "or leave it out of tracking.to\n"
    )
