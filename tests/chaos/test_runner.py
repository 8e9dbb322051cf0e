"""The runner and the command: a broken promise is a violation, whose evidence is kept. No node runs."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import __main__ as command
from tests.chaos import runner
from tests.chaos.fault_context import FaultContext
from tests.chaos.faults import catalog as faults
from tests.chaos.faults.base import Ends, Fault
from tests.chaos.invariants import checks as invariants
from tests.chaos.invariants.checks import Violation
from tests.chaos.observation import evidence
from tests.chaos.observation.evidence import REPORT, copy_home, remove_oldest
from tests.chaos.observation.watch import Observation
from tests.chaos.schedule import Planned
from tests.chaos.swarm import Swarm, SwarmNode

Inject = Callable[[FaultContext], object]


MADE_UP = Violation("no group is used twice", "a", "fault", "group 0123456789ab was used by steps 3, 7")


@dataclass
class EndedProcess:
    """A daemon that has refused to start."""

    log: Path

    def wait(self, *, timeout_s: float) -> int:
        return 2


class FakeNode:
    """A node without a process. It makes a step at each call of `progress`, and refuses to start while damaged."""

    role = "full"

    def __init__(self, folder: Path, name: str = "a") -> None:
        self.name, self.home = name, folder / name
        self.pid, self.is_running, self.is_damaged, self.is_stuck, self.steps = 1, True, False, False, 0
        self.process = EndedProcess(folder / f"{name}.log")
        self.process.log.write_text("its last line\n")
        self.home.mkdir()
        (self.home / "events.jsonl").write_text("{}\n")
        (self.home / "identity.key").write_text("secret")
        (self.home / "weights.safetensors").write_bytes(bytes(evidence.MAX_WEIGHTS_BYTES + 1))

    def start(self) -> None:
        self.pid, self.is_running = self.pid + 1, not self.is_damaged

    def end(self) -> None:
        self.is_running = False

    def stop(self) -> int:
        self.is_running = False
        return 0

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
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNode:
    monkeypatch.setattr(invariants, "snapshot", lambda node: Observation("a"))
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [])
    monkeypatch.setattr(runner, "ENDS_WITHIN_S", 0.0)
    return FakeNode(tmp_path)


def fault_of(inject: Inject, ends: Ends = Ends.CONTINUES) -> Fault:
    return Fault("fault", "processes", "It recovers.", "", inject, ends, recovers_within_s=1.0)


def runner_of(inject: Inject, *nodes: FakeNode, ends: Ends = Ends.CONTINUES) -> runner.Runner:
    """Return a runner of these nodes with one fault."""
    return runner.Runner(swarm_of(*nodes), {"fault": fault_of(inject, ends)})


def swarm_of(*nodes: FakeNode) -> Swarm:
    """Return a swarm that was not started, with these nodes."""
    swarm = Swarm(Path(), {})
    swarm.nodes = list(nodes)  # type: ignore[arg-type]
    return swarm


def two_faults(name: str) -> list[Planned]:
    return [Planned(number, "fault", name, 0) for number in (1, 2)]


def test_the_faults_of_two_nodes_run_in_parallel_and_each_nodes_in_order(node: FakeNode, tmp_path: Path) -> None:
    both = threading.Barrier(2)  # it times out unless both faults run at the same time
    run_all = runner_of(lambda context: both.wait(timeout=10), node, FakeNode(tmp_path, "b")).run_all
    outcomes = list(run_all({name: two_faults(name) for name in ("a", "b")}, stop_after_s=60.0))
    assert not [outcome.violations for outcome in outcomes if outcome.violations]
    for name in ("a", "b"):
        assert [outcome.planned.number for outcome in outcomes if outcome.planned.node == name] == [1, 2]


def test_no_fault_begins_after_the_time_is_over(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[-1], sleep=time.sleep))
    run_all = runner_of(lambda context: now.append(2.0), node).run_all
    assert len(list(run_all({"a": two_faults("a")}, stop_after_s=1.0))) == 1


def test_an_ended_swarm_node_cannot_be_started(tmp_path: Path) -> None:
    proxy: Any = None
    ended = SwarmNode("a", tmp_path, ("bootstrap",), proxy)
    ended.end()
    with pytest.raises(RuntimeError, match="the swarm is over"):
        ended.start()
    assert not ended.is_running


def damage(exit_code: int, text: str) -> Inject:
    """Return a fault after which the node must refuse to start with this exit code and text."""

    def inject(context: FaultContext) -> None:
        node: Any = context.node
        node.end()
        node.is_damaged = True
        context.undo(lambda: setattr(node, "is_damaged", False))
        context.expect_refusal(exit_code, text)

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
def test_only_a_broken_promise_is_a_violation(node: FakeNode, inject: Inject, ends: Ends, expected: str) -> None:
    outcome = runner_of(inject, node, ends=ends).run(Planned(1, "fault", "a", 0))
    assert len(outcome.violations) == bool(expected)
    assert all(one.figures.startswith(expected) for one in outcome.violations)
    assert node.is_running, "the run continues, also after undone damage"


def test_a_node_that_ended_before_or_makes_no_steps_is_a_violation(node: FakeNode) -> None:
    node.end()
    node.is_stuck = True
    ended, no_step = runner_of(lambda context: None, node).run(Planned(1, "fault", "a", 0)).violations
    assert ended.figures == "the node had ended before: its last line"
    assert no_step.figures.startswith("no new steps in 1 s, the daemon runs")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, node: FakeNode) -> Path:
    """Let `python -m tests.chaos` run in this empty folder, with one fault and a node without a process."""

    @contextmanager
    def running(folder: Path, models: object, **roles: bool) -> Iterator[Swarm]:
        swarm = swarm_of(FakeNode(folder))
        swarm.bootstrap = FakeNode(folder, "bootstrap")  # type: ignore[assignment]
        yield swarm

    monkeypatch.setattr(command, "copy_trained_models", lambda folder: {})
    monkeypatch.setattr(command.Swarm, "running", running)
    monkeypatch.setattr(faults, "chosen", lambda words: {"fault": fault_of(lambda context: context.note("done"))})
    monkeypatch.setattr(invariants, "last_seen", lambda node: Observation("a"))
    monkeypatch.setattr(invariants, "check_end", lambda swarm: [])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "empty"


def run_one_fault(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Run the first fault of seed 3 and return the exit code and the printed lines."""
    code = command.run_and_keep(command.parse(["--seed", "3", "--faults", "1", *arguments]))
    return code, capsys.readouterr().out.splitlines()


def test_a_run_with_a_violation_is_kept_without_secrets_and_its_folder_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [MADE_UP])
    code, lines = run_one_fault(capsys)
    (kept,) = (folder / "chaos-out").glob("3-*")
    assert (code, lines[-3:]) == (1, [f"kept in {kept}", f"  violations/001-a/{REPORT}", "1 faults, 1 violations"])
    report = (kept / "violations" / "001-a" / REPORT).read_text()
    assert f"VIOLATION {MADE_UP}" in report and "% stolen" in report and "Observation(" in report
    assert lines[-1] in (kept / "run.log").read_text()
    timeline = [json.loads(line) for line in (kept / "timeline.jsonl").read_text().splitlines()]
    assert [(entry["moment"], entry["notes"]) for entry in timeline][:2] == [("begins", []), ("injected", ["done"])]
    for name in ("a/events.jsonl", "bootstrap.log", "violations/001-a/home/events.jsonl", "violations/001-a/node.log"):
        assert (kept / name).exists(), name
    assert not {path.name for path in kept.rglob("*")} & {"identity.key", "weights.safetensors"}


@pytest.mark.parametrize("arguments", [(), ("--keep", "mine")])
def test_a_run_without_a_violation_is_kept_only_on_request(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...]
) -> None:
    code, lines = run_one_fault(capsys, *arguments)
    assert (code, lines[-1]) == (0, "1 faults, 0 violations")
    assert [path.name for path in folder.iterdir()] == [*arguments[1:]]


def test_an_error_of_the_harness_ends_the_run_which_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: {}["no such thing"])
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(KeyError, match="no such thing"):
        run_one_fault(capsys)
    (kept,) = (folder / "chaos-out").glob("3-*")
    assert "seed 3" in (kept / "run.log").read_text()


def test_databases_are_copied_with_their_logs_and_damaged_ones_as_files(tmp_path: Path) -> None:
    home, to = tmp_path / "home", tmp_path / "to"
    home.mkdir()
    (home / "damaged.sqlite").write_bytes(b"no database")
    with closing(sqlite3.connect(home / "replay.sqlite")) as database:
        database.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t (n); INSERT INTO t VALUES (7)")
        copy_home(home, to)
    with closing(sqlite3.connect(to / "replay.sqlite")) as copy:
        assert copy.execute("SELECT n FROM t").fetchall() == [(7,)]
    assert (to / "damaged.sqlite").read_bytes() == b"no database"


def test_the_oldest_kept_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MAX_KEPT_RUNS", 2)
    (tmp_path / "my-notes").mkdir()
    for number in range(3):
        found = evidence.Evidence(tmp_path / "work")
        found.log("a line")
        found.keep(tmp_path / f"1-{number}")
    assert len(remove_oldest(tmp_path)) == 2, "one more run makes two"
    assert len(list(tmp_path.glob("1-*"))) == 1
    assert (tmp_path / "my-notes").exists()
