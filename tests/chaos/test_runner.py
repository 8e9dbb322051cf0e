"""What the runner makes of faults: promises that are not kept are violations, whatever the checker sees besides."""

from __future__ import annotations

import os
import random
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

    from tests.chaos.scene import Scene


@dataclass
class EndedProcess:
    """A daemon that refused to start."""

    log: Path

    def wait(self, *, timeout_s: float) -> int:
        return 2


class FakeNode:
    """A node without a process: it takes a step at each look while it runs, and refuses to start while it is bad."""

    name = "a"

    def __init__(self) -> None:
        self.pid, self.is_running, self.is_bad, self.is_stuck, self.steps = 1, True, False, False, 0
        self.process = EndedProcess(Path(os.devnull))

    def start(self) -> None:
        self.pid, self.is_running = self.pid + 1, not self.is_bad

    def end(self) -> None:
        self.is_running = False

    def is_well(self) -> bool:
        return self.is_running

    def work(self) -> int | None:
        self.steps += not self.is_stuck
        return self.steps if self.is_running else None

    def wait_for(self, condition: Callable[[], Any], *, timeout_s: float) -> Any:
        return any(condition() for _ in range(3))

    def last_words(self) -> str:
        return "its last words"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    monkeypatch.setattr(invariants, "snapshot", lambda node: node)
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [])
    monkeypatch.setattr(runner, "DIES_WITHIN_S", 0.0)
    return FakeNode()


def runner_of(inject: Callable[[Scene], object], *nodes: FakeNode) -> runner.Runner:
    """A runner with the one fault `harm`, which the nodes go on after."""
    fault = Fault("harm", "processes", "It holds.", "", inject, Ends.GOES_ON, recovers_within_s=1.0)
    return runner.Runner(swarm_of(*nodes), {"harm": fault})


def swarm_of(*nodes: FakeNode) -> Swarm:
    """Return a swarm that was not started, with these nodes."""
    swarm = Swarm(Path(os.devnull), {})
    swarm.nodes = list(nodes)  # type: ignore[arg-type]
    return swarm


def faults_of(*names: str) -> dict[str, list[Planned]]:
    """Two faults for each node, by its name."""
    return {name: [Planned(2 * number + turn, "harm", name, 0) for turn in (1, 2)] for number, name in enumerate(names)}


def test_nodes_have_their_faults_side_by_side(node: FakeNode) -> None:
    other = FakeNode()
    other.name = "b"
    both = threading.Barrier(2)  # whoever is alone waits in vain
    play_all = runner_of(lambda scene: both.wait(timeout=10), node, other).play_all
    outcomes = list(play_all(faults_of("a", "b"), stop_after_s=60.0))
    assert not [outcome.violations for outcome in outcomes if outcome.violations]
    for name, numbers in {"a": [1, 2], "b": [3, 4]}.items():
        assert [outcome.planned.number for outcome in outcomes if outcome.planned.node == name] == numbers


def test_no_new_fault_is_begun_when_the_time_is_over(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[-1], sleep=time.sleep))
    play_all = runner_of(lambda scene: now.append(2.0), node).play_all
    assert len(list(play_all(faults_of("a"), stop_after_s=1.0))) == 1


def test_what_goes_wrong_with_the_harness_itself_ends_the_run(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: {}["no such thing"])
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(KeyError, match="no such thing"):
        list(runner_of(lambda scene: None, node).play_all(faults_of("a"), stop_after_s=60.0))


def test_a_node_that_ended_between_two_faults_is_a_violation(node: FakeNode) -> None:
    node.end()
    (found,) = play(node, lambda scene: None, Ends.GOES_ON)
    assert found == "it had ended before: its last words"


def test_a_swarm_that_is_over_starts_nothing_more(tmp_path: Path) -> None:
    line: Any = None
    ended = SwarmNode("a", tmp_path, ("bootstrap",), line)
    ended.end()
    with pytest.raises(RuntimeError, match="the swarm is over"):
        ended.start()
    assert not ended.is_running


def play(node: FakeNode, inject: Callable[[Scene], object], ends: Ends) -> list[str]:
    """The figures of the violations."""
    fault = Fault("harm", "processes", "It holds.", "", inject, ends, recovers_within_s=1.0)
    outcome = runner.Runner(swarm_of(node), {"harm": fault}).play(Planned(1, "harm", "a", random.randrange(9)))
    return [violation.figures for violation in outcome.violations]


def test_promises_that_are_kept_are_no_violations(node: FakeNode) -> None:
    assert play(node, lambda scene: None, Ends.GOES_ON) == []
    assert play(node, lambda scene: node.end(), Ends.RESTARTS) == []
    assert (node.pid, node.is_running) == (2, True), "it was started again"

    def damage(scene: Scene) -> None:
        node.end()
        node.is_bad = True
        scene.undo(lambda: setattr(node, "is_bad", False))
        scene.expect_refusal(2, "last words")

    assert play(node, damage, Ends.REFUSES) == []
    assert node.is_running, "healed, it starts"


@pytest.mark.parametrize("ends", [Ends.GOES_ON, Ends.RESTARTS])
def test_a_daemon_that_ends_or_stays_otherwise_than_promised(node: FakeNode, ends: Ends) -> None:
    does: dict[Ends, Callable[[Scene], object]] = {
        Ends.GOES_ON: lambda scene: node.end(),
        Ends.RESTARTS: lambda scene: None,
    }
    words = {Ends.GOES_ON: "the daemon ended", Ends.RESTARTS: "the daemon did not end"}
    (found,) = play(node, does[ends], ends)
    assert found.startswith(words[ends])
    assert node.is_running, "the run goes on"


def test_another_refusal_than_expected(node: FakeNode) -> None:
    def damage(scene: Scene) -> None:
        node.end()
        node.is_bad = True
        scene.undo(lambda: setattr(node, "is_bad", False))
        scene.expect_refusal(3, "the disk is full")

    (found,) = play(node, damage, Ends.REFUSES)
    assert found == "exit code 2, 'its last words'; 3, 'the disk is full' were expected"


def test_a_node_that_makes_no_new_step_and_a_fault_that_could_not_be_done(node: FakeNode) -> None:
    node.is_stuck = True

    def fails(scene: Scene) -> None:
        raise AssertionError("no such process")

    could_not, no_step = play(node, fails, Ends.GOES_ON)
    assert could_not == "AssertionError: no such process"
    assert no_step.startswith("no new steps in 1 s, the daemon stands")
