"""A broken promise and a violated invariant are violations of a run. No node runs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import runner
from tests.chaos.faults.base import Ends, Fault, FaultContext, Refusal
from tests.chaos.faults.catalog import Planned
from tests.chaos.invariants import checks as invariants
from tests.chaos.invariants.checks import Violation
from tests.chaos.observation.watch import Observation
from tests.chaos.swarm import Swarm

Inject = Callable[[FaultContext], object]
PLANNED = Planned(1, "fault", "a", 0)


@dataclass
class EndedProcess:
    """A daemon that has refused to start."""

    log: Path

    def wait(self, *, timeout_s: float) -> int:
        return 2


class FakeNode:
    """A node without a process. It makes a step at each call of `progress`, and refuses to start while damaged."""

    role, name = "full", "a"

    def __init__(self, folder: Path) -> None:
        self.home = folder / self.name
        self.pid, self.is_running, self.is_damaged, self.is_stuck, self.steps = 1, True, False, False, 0
        self.process = EndedProcess(folder / "a.log")
        self.process.log.write_text("its last line\n")
        self.home.mkdir()
        (self.home / "events.jsonl").write_text("{}\n")
        (self.home / "identity.key").write_text("secret")

    def start(self) -> None:
        self.pid, self.is_running = self.pid + 1, not self.is_damaged

    def end(self) -> None:
        self.is_running = False

    def is_ready(self) -> bool:
        return self.is_running

    def progress(self) -> int | None:
        self.steps += not self.is_stuck
        return self.steps if self.is_running else None

    def wait_for(self, condition: Callable[[], Any], *, timeout_s: float) -> Any:
        return any(condition() for _ in range(3))

    def last_log_line(self) -> str:
        return "its last line"


@pytest.fixture
def node(monkeypatch, tmp_path):
    monkeypatch.setattr(invariants, "snapshot", lambda node: Observation("a"))
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [])
    monkeypatch.setattr(runner, "ENDS_WITHIN_S", 0.0)
    return FakeNode(tmp_path)


def run(inject: Inject, node: Any, ends: Ends = Ends.CONTINUES) -> tuple[Violation, ...]:
    swarm = Swarm(node.home.parent, {})
    swarm.nodes = [node]
    fault = Fault("processes", "fault", "It recovers.", inject, ends)
    return runner.Runner(swarm, {"fault": fault}).run(PLANNED).violations


def damage(exit_code: int, text: str) -> Inject:
    """Return a fault after which the node must refuse to start with this exit code and text."""

    def inject(context: FaultContext) -> None:
        node: Any = context.node
        node.end()
        node.is_damaged = True
        context.undoing.callback(setattr, node, "is_damaged", False)
        context.refusal = Refusal(exit_code, text)

    return inject


def end_node(context: FaultContext) -> None:
    context.node.end()


def fail(context: FaultContext) -> None:
    raise AssertionError("no such process")


OUTCOMES: dict[str, tuple[Inject, Ends, str]] = {
    "continues": (lambda context: None, Ends.CONTINUES, ""),
    "restarts": (end_node, Ends.RESTARTS, ""),
    "refuses": (damage(2, "last line"), Ends.REFUSES, ""),
    "continues not": (end_node, Ends.CONTINUES, "the daemon ended"),
    "restarts not": (lambda context: None, Ends.RESTARTS, "the daemon did not end"),
    "refuses with another text": (
        damage(3, "the disk is full"),
        Ends.REFUSES,
        "exit code 2, 'its last line'; 3, 'the disk is full' were expected",
    ),
    "fails": (fail, Ends.CONTINUES, "AssertionError: no such process"),
}


@pytest.mark.parametrize(("inject", "ends", "expected"), list(OUTCOMES.values()), ids=list(OUTCOMES))
def test_only_a_broken_promise_is_a_violation(node, inject, ends, expected):
    violations = run(inject, node, ends)
    assert len(violations) == bool(expected)
    assert all(one.figures.startswith(expected) for one in violations)
    assert node.is_running, "the run continues, also after undone damage"


def test_a_node_that_ended_before_or_makes_no_steps_is_a_violation(node):
    node.end()
    node.is_stuck = True
    ended, no_step = run(lambda context: None, node)
    assert ended.figures == "the node had ended before: its last line"
    assert no_step.figures.startswith("no new steps in 300 s, the daemon runs")


def test_a_violated_invariant_is_recorded_with_the_files_of_the_node(node, monkeypatch, tmp_path):
    made_up = Violation("no group is used twice", "a", "fault", "group 0123456789ab was used by steps 3, 7")
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [made_up])
    assert run(lambda context: None, node) == (made_up,)
    record = tmp_path / "violations" / "001-a"
    assert f"VIOLATION {made_up}" in (record / "report.txt").read_text()
    assert {path.name for path in record.rglob("*")} == {"report.txt", "node.log", "home", "events.jsonl"}
