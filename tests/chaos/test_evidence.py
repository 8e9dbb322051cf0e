"""The evidence of a run with a made-up violation, and no evidence of a run without one."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.chaos import __main__ as command
from tests.chaos.faults import catalog as faults
from tests.chaos.faults.base import Ends, Fault
from tests.chaos.invariants import checks as invariants
from tests.chaos.invariants.checks import Violation
from tests.chaos.machine import Meter
from tests.chaos.observation import copies, evidence
from tests.chaos.observation.buffer import Buffer, Row
from tests.chaos.observation.copies import Copier
from tests.chaos.observation.event_log import Event
from tests.chaos.observation.evidence import REPORT, Evidence, matching_lines, remove_oldest
from tests.chaos.observation.watch import Observation
from tests.chaos.schedule import Planned
from tests.chaos.test_runner import EndedProcess, FakeNode, swarm_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.swarm import Swarm

GROUP = "0123456789ab" + 52 * "c"
OTHER = "f" * 64
FIGURES = f"group {GROUP[:12]} was used by steps 3, 7"
EVENTS = [
    {"time": 1, "event": "start", "peer": "12D3us"},
    {"time": 2, "event": "admitted", "group": GROUP, "number": 5},
    {"time": 3, "event": "taken", "group": OTHER, "step": 9},
    {"time": 4, "event": "taken", "group": GROUP, "step": 3},
    {"time": 5, "event": "step", "step": 7},
]


class NodeWithFiles(FakeNode):
    """A node without a process, with a home that has files of each kind."""

    role = "full"

    def __init__(self, folder: Path, name: str = "a") -> None:
        super().__init__()
        self.name, self.home = name, folder / name
        self.process = EndedProcess(folder / f"{name}.log")
        (self.home / "checkpoints" / "step-00000003").mkdir(parents=True)
        (self.home / "checkpoints" / "step-00000003" / "state.json").write_text("{}")
        (self.home / "checkpoints" / "step-00000003" / "weights.safetensors").write_bytes(bytes(2 * copies.MIB))
        (self.home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
        (self.home / "identity.key").write_text("secret")
        self.process.log.write_text("started\nstep 7\n")
        with closing(sqlite3.connect(self.home / "replay.sqlite")) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("CREATE TABLE groups (id TEXT)")
            database.execute("INSERT INTO groups VALUES (?)", (GROUP,))
            database.commit()

    def stop(self) -> int:
        self.is_running = False
        return 0


def observation() -> Observation:
    row = Row(GROUP, own=True, sender="12D3us", number=5, state="taken", step=7)
    return Observation("a", events=(Event("step", 5.0, {"step": 7}),), buffer=Buffer((row,)), floor_step=7)


def write_record(folder: Path, node: NodeWithFiles) -> Path:
    """Record one violation and return the folder of the record."""
    found = Evidence(folder)
    planned = Planned(12, "kill-learner", "a", 0)
    found.note("begins", planned)
    found.note("injected", planned, notes=["pid 4711"])
    found.note("begins", Planned(13, "isolate", "b", 0))
    meter = Meter()
    violation = Violation("no group is used twice", "a", "kill-learner", FIGURES)
    found.record(node, [violation], seen=(observation(), observation()), load=meter.read())  # type: ignore[arg-type]
    return folder / "violations" / "001-a"


def test_a_report_names_invariant_fault_node_time_machine_and_matching_lines(tmp_path: Path) -> None:
    report = (write_record(tmp_path, NodeWithFiles(tmp_path)) / REPORT).read_text()
    assert f"VIOLATION no group is used twice: node a, after kill-learner: {FIGURES}" in report
    assert "    fault: kill-learner\n" in report
    assert "node: a (full)" in report
    assert "UTC" in report and "% stolen" in report and "load " in report
    assert '"notes": ["pid 4711"]' in report, "the details of the fault"
    assert '"fault": "isolate"' in report, "the last fault of another node"
    for number in (2, 4, 5):
        assert f"events.jsonl:{number}: {json.dumps(EVENTS[number - 1])}" in report
    assert "a.log:2: step 7" in report


def test_lines_match_the_values_that_the_figures_name(tmp_path: Path) -> None:
    node = NodeWithFiles(tmp_path)
    many = [*EVENTS, *({"event": "turn", "number": 9 + n} for n in range(20))]
    (node.home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in many))
    shown = matching_lines(FIGURES, event_log=node.home / "events.jsonl", log=tmp_path / "none.log")
    assert [line.split(": ")[0] for line in shown[:3]] == [f"events.jsonl:{number}" for number in (2, 4, 5)]
    assert not any(OTHER in line for line in shown)
    event_log = node.home / "events.jsonl"
    (numbered, *_) = matching_lines("own groups 5 to 5 are gone", event_log=event_log, log=tmp_path / "none.log")
    assert numbered.startswith("events.jsonl:2: ")


def test_a_record_keeps_the_checked_state_and_the_files_of_that_moment(tmp_path: Path) -> None:
    node = NodeWithFiles(tmp_path)
    folder = write_record(tmp_path, node)
    checked = [json.loads(line) for line in (folder / "checked.jsonl").read_text().splitlines()]
    assert checked[0] == {"time": 5.0, "event": "step", "step": 7}
    assert checked[1]["row"]["id"] == GROUP
    assert [seen["floor_step"] for seen in json.loads((folder / "seen.json").read_text())] == [7, 7]
    (node.home / "events.jsonl").unlink()
    assert (folder / "home" / "events.jsonl").read_text().count("\n") == len(EVENTS), "a copy, not the node's file"
    assert (folder / "node.log").read_text() == "started\nstep 7\n"


def test_without_a_violation_nothing_is_recorded(tmp_path: Path) -> None:
    found = Evidence(tmp_path)
    found.record(NodeWithFiles(tmp_path), [], seen=())  # type: ignore[arg-type]
    assert (found.num_records, list((tmp_path / "violations").iterdir())) == (0, [])


def test_homes_are_kept_without_secrets_and_large_weights_and_these_are_listed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    write_record(work, NodeWithFiles(work))
    found = Evidence(work)
    (line, *reports) = found.keep(tmp_path / "out")
    assert line.startswith(f"kept in {tmp_path / 'out'} (") and reports == [f"  violations/001-a/{REPORT}"]
    assert (tmp_path / "out" / "a" / "checkpoints" / "step-00000003" / "state.json").exists()
    assert (tmp_path / "out" / "a.log").exists()
    names = {path.name for path in (tmp_path / "out").rglob("*")}
    assert not names & {"weights.safetensors", "identity.key"}
    assert (tmp_path / "out" / "left-out.txt").read_text().splitlines() == [
        "a/identity.key: a secret",
        "a/checkpoints/step-00000003/weights.safetensors: weights, 2.0 MiB",
    ]
    with closing(sqlite3.connect(tmp_path / "out" / "a" / "replay.sqlite")) as database:
        assert database.execute("SELECT id FROM groups").fetchall() == [(GROUP,)]


def test_a_damaged_database_is_copied_as_a_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("replay.sqlite", "replay.sqlite-wal"):
        (home / name).write_bytes(b"no database")
    copier = Copier()
    copier.copy(home, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["replay.sqlite", "replay.sqlite-wal"]
    assert copier.left_out == []


def test_copies_are_limited_and_of_a_long_text_the_end_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MAX_TEXT_BYTES", 10)
    home = tmp_path / "home"
    home.mkdir()
    (home / "events.jsonl").write_text("x" * 90 + "the end...")
    (home / "small.json").write_text("{}")
    (home / "more.json").write_text("m" * 50)
    copier = Copier(bytes_left=20)
    copier.copy(home, tmp_path / "copy")
    assert (tmp_path / "copy" / "events.jsonl").read_text() == "the end..."
    assert not (tmp_path / "copy" / "more.json").exists(), "above the limit"
    assert [one.partition(":")[0] for one in copier.left_out] == ["home/more.json", "home/events.jsonl"]


def test_the_oldest_kept_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MAX_KEPT_RUNS", 2)
    (tmp_path / "my-notes").mkdir()
    for number in range(3):
        Evidence(tmp_path / "work").keep(tmp_path / f"1-{number}")
    assert len(remove_oldest(tmp_path)) == 2, "one more run makes two"
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["1-2", "my-notes"]


@pytest.fixture
def _swarm_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let `python -m tests.chaos` run in an empty folder, with one fault and a node without a process."""

    @contextmanager
    def running(folder: Path, models: object, **roles: bool) -> Iterator[Swarm]:
        node, bootstrap = NodeWithFiles(folder), NodeWithFiles(folder, "bootstrap")
        swarm = swarm_of(node)
        swarm.bootstrap = bootstrap  # type: ignore[assignment]
        yield swarm

    fault = Fault("harmless", "processes", "It continues.", "", lambda context: context.note("done"), Ends.CONTINUES)
    monkeypatch.setattr(command, "copy_trained_models", lambda folder: {})
    monkeypatch.setattr(command.Swarm, "running", running)
    monkeypatch.setattr(faults, "chosen", lambda words: {"harmless": fault})
    monkeypatch.setattr(invariants, "snapshot", lambda node: observation())
    monkeypatch.setattr(invariants, "last_seen", lambda node: observation())
    monkeypatch.setattr(invariants, "check_end", lambda swarm: [])
    monkeypatch.chdir(tmp_path)


def run_one_fault(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Run the first fault of seed 3 and return the exit code and the printed lines."""
    code = command.run_and_keep(command.parse(["--seed", "3", "--faults", "1", *arguments]))
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("_swarm_of_one")
def test_a_run_with_a_violation_is_kept_and_its_folder_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made_up = Violation("no group is used twice", "a", "harmless", FIGURES)
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [made_up])
    code, lines = run_one_fault(capsys)
    (folder,) = (tmp_path / "chaos-out").glob("3-*")
    assert (code, lines[-1]) == (1, "1 faults, 1 violations")
    assert lines[-3].startswith(f"kept in {folder} (")
    assert lines[-2] == f"  violations/001-a/{REPORT}"
    assert f"VIOLATION {made_up}" in (folder / "violations" / "001-a" / REPORT).read_text()
    assert lines[-1] in (folder / "run.log").read_text()
    timeline = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    assert [entry["moment"] for entry in timeline] == ["begins", "injected", "checked"]
    assert (folder / "a" / "events.jsonl").exists() and (folder / "bootstrap.log").exists()


@pytest.mark.usefixtures("_swarm_of_one")
@pytest.mark.parametrize("is_requested", [False, True])
def test_a_run_without_a_violation_is_kept_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, *, is_requested: bool
) -> None:
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [])
    code, lines = run_one_fault(capsys, *(("--keep", "mine") if is_requested else ()))
    assert (code, lines[-1]) == (0, "1 faults, 0 violations")
    assert {path.name for path in tmp_path.iterdir()} == ({"mine"} if is_requested else set())
    assert not is_requested or (tmp_path / "mine" / "a" / "events.jsonl").exists()


@pytest.mark.usefixtures("_swarm_of_one")
def test_a_run_that_an_error_of_the_harness_ends_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(invariants, "check_end", lambda swarm: {}["no such thing"])
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [])
    with pytest.raises(KeyError, match="no such thing"):
        run_one_fault(capsys)
    (folder,) = (tmp_path / "chaos-out").glob("3-*")
    assert "harmless on a" in (folder / "run.log").read_text()
