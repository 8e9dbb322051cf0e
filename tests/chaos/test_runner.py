"""The runner: a broken promise is a violation, and the faults of all nodes run in parallel."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos import runner
from tests.chaos.faults.base import Ends, Fault
from tests.chaos.invariants import checks as invariants
from tests.chaos.schedule import Planned
from tests.chaos.swarm import Swarm, SwarmNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.fault_context import FaultContext


@dataclass
class EndedProcess:
    """A daemon that has refused to start."""

    log: Path

    def wait(self, *, timeout_s: float) -> int:
        return 2


class FakeNode:
    """A node without a process. It makes a step at each call of `progress`, and refuses to start while damaged."""

    name = "a"

    def __init__(self) -> None:
        self.pid, self.is_running, self.is_damaged, self.is_stuck, self.steps = 1, True, False, False, 0
        self.process = EndedProcess(Path(os.devnull))

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
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    monkeypatch.setattr(invariants, "snapshot", lambda node: node)
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [])
    monkeypatch.setattr(runner, "ENDS_WITHIN_S", 0.0)
    return FakeNode()


def runner_of(inject: Callable[[FaultContext], object], *nodes: FakeNode, ends: Ends = Ends.CONTINUES) -> runner.Runner:
    """Return a runner of these nodes with one fault."""
    fault = Fault("fault", "processes", "It recovers.", "", inject, ends, recovers_within_s=1.0)
    return runner.Runner(swarm_of(*nodes), {"fault": fault})


def swarm_of(*nodes: FakeNode) -> Swarm:
    """Return a swarm that was not started, with these nodes."""
    swarm = Swarm(Path(os.devnull), {})
    swarm.nodes = list(nodes)  # type: ignore[arg-type]
    return swarm


def faults_of(*names: str) -> dict[str, list[Planned]]:
    """Return two faults for each node, by its name."""
    return {
        name: [Planned(2 * number + turn, "fault", name, 0) for turn in (1, 2)] for number, name in enumerate(names)
    }


def test_the_faults_of_two_nodes_run_in_parallel(node: FakeNode) -> None:
    other = FakeNode()
    other.name = "b"
    both = threading.Barrier(2)  # it times out unless both faults run at the same time
    run_all = runner_of(lambda context: both.wait(timeout=10), node, other).run_all
    outcomes = list(run_all(faults_of("a", "b"), stop_after_s=60.0))
    assert not [outcome.violations for outcome in outcomes if outcome.violations]
    for name, numbers in {"a": [1, 2], "b": [3, 4]}.items():
        assert [outcome.planned.number for outcome in outcomes if outcome.planned.node == name] == numbers


def test_no_fault_begins_after_the_time_is_over(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[-1], sleep=time.sleep))
    run_all = runner_of(lambda context: now.append(2.0), node).run_all
    assert len(list(run_all(faults_of("a"), stop_after_s=1.0))) == 1


def test_an_error_of_the_harness_ends_the_run(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: {}["no such thing"])
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(KeyError, match="no such thing"):
        list(runner_of(lambda context: None, node).run_all(faults_of("a"), stop_after_s=60.0))


def test_a_node_that_ended_between_two_faults_is_a_violation(node: FakeNode) -> None:
    node.end()
    (found,) = violations_of(node, lambda context: None, Ends.CONTINUES)
    assert found == "the node had ended before: its last line"


def test_an_ended_swarm_node_cannot_be_started(tmp_path: Path) -> None:
    proxy: Any = None
    ended = SwarmNode("a", tmp_path, ("bootstrap",), proxy)
    ended.end()
    with pytest.raises(RuntimeError, match="the swarm is over"):
        ended.start()
    assert not ended.is_running


def violations_of(node: FakeNode, inject: Callable[[FaultContext], object], ends: Ends) -> list[str]:
    """Run one fault and return the figures of the violations."""
    outcome = runner_of(inject, node, ends=ends).run(Planned(1, "fault", "a", 0))
    return [violation.figures for violation in outcome.violations]


def damage(node: FakeNode, exit_code: int, text: str) -> Callable[[FaultContext], None]:
    """Return a fault after which the node must refuse to start with this exit code and text."""

    def inject(context: FaultContext) -> None:
        node.end()
        node.is_damaged = True
        context.undo(lambda: setattr(node, "is_damaged", False))
        context.expect_refusal(exit_code, text)

    return inject


def test_a_kept_promise_is_no_violation(node: FakeNode) -> None:
    assert violations_of(node, lambda context: None, Ends.CONTINUES) == []
    assert violations_of(node, lambda context: node.end(), Ends.RESTARTS) == []
    assert (node.pid, node.is_running) == (2, True), "the runner restarted the node"
    assert violations_of(node, damage(node, 2, "last line"), Ends.REFUSES) == []
    assert node.is_running, "it starts after the damage is undone"


@pytest.mark.parametrize("ends", [Ends.CONTINUES, Ends.RESTARTS])
def test_a_daemon_that_breaks_its_promise_is_a_violation(node: FakeNode, ends: Ends) -> None:
    faults: dict[Ends, Callable[[FaultContext], object]] = {
        Ends.CONTINUES: lambda context: node.end(),
        Ends.RESTARTS: lambda context: None,
    }
    expected = {Ends.CONTINUES: "the daemon ended", Ends.RESTARTS: "the daemon did not end"}
    (found,) = violations_of(node, faults[ends], ends)
    assert found.startswith(expected[ends])
    assert node.is_running, "the run continues"


def test_another_refusal_than_expected_is_a_violation(node: FakeNode) -> None:
    (found,) = violations_of(node, damage(node, 3, "the disk is full"), Ends.REFUSES)
    assert found == "exit code 2, 'its last line'; 3, 'the disk is full' were expected"


def test_a_failed_injection_and_a_node_without_new_steps_are_violations(node: FakeNode) -> None:
    node.is_stuck = True

    def fails(context: FaultContext) -> None:
        raise AssertionError("no such process")

    failed, no_step = violations_of(node, fails, Ends.CONTINUES)
    assert failed == "AssertionError: no such process"
    assert no_step.startswith("no new steps in 1 s, the daemon runs")
