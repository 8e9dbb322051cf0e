"""What is kept of a run with a made-up violation: what its cause can be found by, and nothing where there is none."""

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
from tests.chaos.observing import copies, evidence
from tests.chaos.observing.buffer import Buffer, Row
from tests.chaos.observing.copies import Copier
from tests.chaos.observing.evidence import REPORT, Evidence, lines_that_show, rotate
from tests.chaos.observing.observe import Observation
from tests.chaos.observing.trail import Event
from tests.chaos.schedule import Planned
from tests.chaos.test_runner import EndedProcess, FakeNode, swarm_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.swarm import Swarm

GROUP = "0123456789ab" + 52 * "c"
OTHER = "f" * 64
FIGURES = f"group {GROUP[:12]} was used by steps 3, 7"
TRAIL = [
    {"time": 1, "event": "start", "peer": "12D3us"},
    {"time": 2, "event": "admitted", "group": GROUP, "number": 5},
    {"time": 3, "event": "taken", "group": OTHER, "step": 9},
    {"time": 4, "event": "taken", "group": GROUP, "step": 3},
    {"time": 5, "event": "step", "step": 7},
]


class NodeWithFiles(FakeNode):
    """A node without a process whose home has files of each sort."""

    role = "full"

    def __init__(self, folder: Path, name: str = "a") -> None:
        super().__init__()
        self.name, self.home = name, folder / name
        self.process = EndedProcess(folder / f"{name}.log")
        (self.home / "checkpoints" / "step-00000003").mkdir(parents=True)
        (self.home / "checkpoints" / "step-00000003" / "state.json").write_text("{}")
        (self.home / "checkpoints" / "step-00000003" / "weights.safetensors").write_bytes(bytes(2 * copies.MIB))
        (self.home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in TRAIL))
        (self.home / "identity.key").write_text("secret")
        self.process.log.write_text("it starts\nit goes on\n")
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


def written(folder: Path, node: NodeWithFiles) -> Path:
    """What one look with a violation writes."""
    found = Evidence(folder)
    planned = Planned(12, "kill-learner", "a", 0)
    found.note("begins", planned)
    found.note("is done", planned, notes=["pid 4711"])
    found.note("begins", Planned(13, "cut-off", "b", 0))
    meter = Meter()
    violation = Violation("no group is used twice", "a", "kill-learner", FIGURES)
    found.look(node, [violation], seen=(observation(), observation()), busy=meter.read())  # type: ignore[arg-type]
    return folder / "violations" / "001-a"


def test_a_report_names_invariant_fault_node_time_machine_and_the_lines_that_show_it(tmp_path: Path) -> None:
    report = (written(tmp_path, NodeWithFiles(tmp_path)) / REPORT).read_text()
    assert f"VIOLATION no group is used twice: node a, after kill-learner: {FIGURES}" in report
    assert "    fault: kill-learner\n" in report
    assert "node: a (full)" in report
    assert "UTC" in report and "% stolen" in report and "load " in report
    assert '"notes": ["pid 4711"]' in report, "what exactly was done to it"
    assert '"fault": "cut-off"' in report, "and what was done to its neighbors meanwhile"
    for number in (2, 4, 5):
        assert f"events.jsonl:{number}: {json.dumps(TRAIL[number - 1])}" in report
    assert "a.log:2: it goes on" in report


def test_the_lines_are_those_that_the_figures_name(tmp_path: Path) -> None:
    node = NodeWithFiles(tmp_path)
    many = [*TRAIL, *({"event": "turn", "number": 9 + n} for n in range(20))]
    (node.home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in many))
    shown = lines_that_show(FIGURES, trail=node.home / "events.jsonl", log=tmp_path / "none.log")
    assert [line.split(": ")[0] for line in shown[:3]] == [f"events.jsonl:{number}" for number in (2, 4, 5)]
    assert not any(OTHER in line for line in shown)
    (numbered, *_) = lines_that_show("own groups 5 to 5 are gone", trail=node.home / "events.jsonl", log=tmp_path / "x")
    assert numbered.startswith("events.jsonl:2: ")


def test_what_was_judged_and_the_files_of_that_moment_are_kept(tmp_path: Path) -> None:
    node = NodeWithFiles(tmp_path)
    place = written(tmp_path, node)
    judged = [json.loads(line) for line in (place / "judged.jsonl").read_text().splitlines()]
    assert judged[0] == {"time": 5.0, "event": "step", "step": 7}
    assert judged[1]["row"]["id"] == GROUP
    assert [seen["floor_step"] for seen in json.loads((place / "seen.json").read_text())] == [7, 7]
    (node.home / "events.jsonl").unlink()
    assert (place / "home" / "events.jsonl").read_text().count("\n") == len(TRAIL), "whatever becomes of them later"
    assert (place / "node.log").read_text() == "it starts\nit goes on\n"


def test_a_look_that_finds_nothing_writes_nothing(tmp_path: Path) -> None:
    found = Evidence(tmp_path)
    found.look(NodeWithFiles(tmp_path), [], seen=())  # type: ignore[arg-type]
    assert (found.num_looks, list((tmp_path / "violations").iterdir())) == (0, [])


def test_homes_are_kept_without_secrets_and_big_weights_and_it_says_so(tmp_path: Path) -> None:
    work = tmp_path / "work"
    written(work, NodeWithFiles(work))
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


def test_a_database_that_is_damaged_is_copied_as_it_lies(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("replay.sqlite", "replay.sqlite-wal"):
        (home / name).write_bytes(b"no database")
    copier = Copier()
    copier.copy(home, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["replay.sqlite", "replay.sqlite-wal"]
    assert copier.left_out == []


def test_copies_are_bounded_and_of_a_long_text_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_OF_A_TEXT", 10)
    home = tmp_path / "home"
    home.mkdir()
    (home / "events.jsonl").write_text("x" * 90 + "the end..." + "")
    (home / "small.json").write_text("{}")
    (home / "more.json").write_text("m" * 50)
    copier = Copier(bytes_left=20)
    copier.copy(home, tmp_path / "copy")
    assert (tmp_path / "copy" / "events.jsonl").read_text() == "the end..."
    assert not (tmp_path / "copy" / "more.json").exists(), "no room for it"
    assert [one.partition(":")[0] for one in copier.left_out] == ["home/more.json", "home/events.jsonl"]


def test_the_newest_kept_runs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MOST_KEPT_RUNS", 2)
    (tmp_path / "my-notes").mkdir()
    for number in range(3):
        Evidence(tmp_path / "work").keep(tmp_path / f"1-{number}")
    assert len(rotate(tmp_path)) == 2, "so that one more makes two"
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["1-2", "my-notes"]


@pytest.fixture
def _a_swarm_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`python -m tests.chaos` in an empty folder, with a node that has no process and one fault."""

    @contextmanager
    def running(folder: Path, models: object, **roles: bool) -> Iterator[Swarm]:
        node, meeting_point = NodeWithFiles(folder), NodeWithFiles(folder, "meet")
        swarm = swarm_of(node)
        swarm.meeting_point = meeting_point  # type: ignore[assignment]
        yield swarm

    harm = Fault("harm", "processes", "It holds.", "", lambda scene: scene.note("done"), Ends.GOES_ON)
    monkeypatch.setattr(command, "copy_trained_models", lambda folder: {})
    monkeypatch.setattr(command.Swarm, "running", running)
    monkeypatch.setattr(faults, "chosen", lambda words: {"harm": harm})
    monkeypatch.setattr(invariants, "snapshot", lambda node: observation())
    monkeypatch.setattr(invariants, "last_seen", lambda node: observation())
    monkeypatch.setattr(invariants, "check_end", lambda swarm: [])
    monkeypatch.chdir(tmp_path)


def played(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """The exit code and the lines of one fault of seed 3."""
    code = command.run_and_keep(command.parse(["--seed", "3", "--faults", "1", *arguments]))
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("_a_swarm_of_one")
def test_a_run_with_a_violation_keeps_it_and_names_the_folder_before_its_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made_up = Violation("no group is used twice", "a", "harm", FIGURES)
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [made_up])
    code, lines = played(capsys)
    (folder,) = (tmp_path / "chaos-out").glob("3-*")
    assert (code, lines[-1]) == (1, "1 faults, 1 violations")
    assert lines[-3].startswith(f"kept in {folder} (")
    assert lines[-2] == f"  violations/001-a/{REPORT}"
    assert f"VIOLATION {made_up}" in (folder / "violations" / "001-a" / REPORT).read_text()
    assert lines[-1] in (folder / "run.log").read_text()
    timeline = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    assert [entry["what"] for entry in timeline] == ["begins", "is done", "is judged"]
    assert (folder / "a" / "events.jsonl").exists() and (folder / "meet.log").exists()


@pytest.mark.usefixtures("_a_swarm_of_one")
@pytest.mark.parametrize("is_requested", [False, True])
def test_a_run_without_one_keeps_nothing_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, *, is_requested: bool
) -> None:
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [])
    code, lines = played(capsys, *(("--keep", "mine") if is_requested else ()))
    assert (code, lines[-1]) == (0, "1 faults, 0 violations")
    assert {path.name for path in tmp_path.iterdir()} == ({"mine"} if is_requested else set())
    assert not is_requested or (tmp_path / "mine" / "a" / "events.jsonl").exists()


@pytest.mark.usefixtures("_a_swarm_of_one")
def test_a_run_that_the_harness_breaks_off_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(invariants, "check_end", lambda swarm: {}["no such thing"])
    monkeypatch.setattr(invariants, "check", lambda before, after, fault: [])
    with pytest.raises(KeyError, match="no such thing"):
        played(capsys)
    (folder,) = (tmp_path / "chaos-out").glob("3-*")
    assert "harm on a" in (folder / "run.log").read_text()
