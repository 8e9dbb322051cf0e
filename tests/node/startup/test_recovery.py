"""A home with damaged files: readable data is saved, no group is used twice, and the damage is logged."""

import errno
import json
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.config.home_files import mark
from ftis_node.config.manifest import load_manifest
from ftis_node.errors import ConfigError, DamagedError, FtisError, MachineError
from ftis_node.node.peers.reputation_store import ReputationStore
from ftis_node.node.startup import home_opening
from ftis_node.node.startup.home_opening import opened_home, release_damaged, replace_files
from ftis_node.node.startup.run_plan import plan_run
from ftis_node.node.storage.node_store import begin_epoch
from ftis_node.node.training.step_groups import write_taken
from ftis_node.replay import integrity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.swarm.receipts import ReceiptBook
from ftis_node.swarm.reputation import Behaviour, ReputationTable
from ftis_node.telemetry.clock import SteadyClock
from ftis_node.telemetry.events import EventLog, read_events
from ftis_node.validation import Accepted
from tests.replay.test_buffer import ANN, ME, accepted

NUM_GROUPS = 60
PAGE = 4096


def noise(num_bytes: int) -> bytes:
    return random.Random(1).randbytes(num_bytes)


@pytest.fixture
def home(tmp_path):
    """Make a home with a buffer of 60 groups, of which a step used the first 30, and its event log."""
    home = Home(tmp_path / "home")
    home.create()
    with closing(ReplayBuffer(home.replay)) as buffer, closing(EventLog(home.events)) as events:
        begin_epoch(home, buffer)
        events.write("start", peer=ME.peer_id)
        groups = [new_group(buffer, at) for at in range(NUM_GROUPS)]
        admit(buffer, events, groups[:30])
        write_taken(events, buffer.take(1, own=15, foreign=15).groups, step=1)
        events.write("step", step=1, loss=float("nan"))
        admit(buffer, events, groups[30:])
    return home


def new_group(buffer: ReplayBuffer, at: int) -> Accepted:
    """Return an own group for an even `at`, else one of a peer."""
    return accepted(ANN if at % 2 else ME, (0 if at % 2 else buffer.last_number()) + 1 + at // 2)


def admit(buffer: ReplayBuffer, events: EventLog, groups: list[Accepted]) -> None:
    buffer.admit_many([(group, group.group.sender == ME.peer_id) for group in groups])
    for one in groups:
        own, number = one.group.sender == ME.peer_id, one.group.number
        events.write("admitted", group=one.envelope.id, own=own, sender=one.group.sender, number=number)


def recover(home: Home) -> None:
    replace_files(home)
    with closing(ReplayBuffer(home.replay)) as buffer, closing(EventLog(home.events)) as events:
        release_damaged(buffer, events)


def events_of(home: Home, name: str) -> list[dict[str, object]]:
    return read_events(home.events, name=name)


def stored(home: Home) -> list[tuple[object, ...]]:
    """Return the rows of all groups, as they are on disk."""
    return query(home.replay, "SELECT id, state, step, reason FROM groups ORDER BY id")


def ready_ids(home: Home) -> set[str]:
    with closing(ReplayReader(home.replay)) as reader:
        return {group.id for group in reader.list_groups(limit=1000, state="ready")}


def query(path: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as db, db:
        return db.execute(statement).fetchall()


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def assert_reset(home: Home) -> None:
    """Assert that the buffer is undamaged and empty, admits no group again and uses no number again."""
    assert not integrity.find_damage(home.replay)
    assert stored(home) == []
    with closing(ReplayBuffer(home.replay)) as buffer:
        used = buffer.last_number() + NUM_GROUPS  # the last start numbered above the beginning of its epoch
        assert begin_epoch(home, buffer) > used
        assert not buffer.admit(accepted(ANN, 99, created_at=1e9), own=False), (
            "a group from before the reset was admitted"
        )
        assert buffer.admit(accepted(ANN, 99, created_at=int(time.time()) + 2), own=False)
        assert buffer.admit(accepted(ME, buffer.last_number() + 1), own=True)


def assert_reported(home: Home, why: str = "") -> None:
    """Assert that one event reports one reset, also after another start."""
    (event,) = events_of(home, "recovered")
    assert event["file"] == "replay.sqlite"
    assert why in str(event["why"])
    before = stored(home)
    recover(home)
    assert stored(home) == before
    assert len(events_of(home, "recovered")) == 1, "reset twice"


def test_a_sound_home_is_not_changed(home, caplog):
    before = stored(home)
    recover(home)
    assert len(before) == NUM_GROUPS and stored(home) == before
    assert not events_of(home, "recovered") and not caplog.text and not home.damaged.exists()


def size_of(home: Home) -> int:
    return home.replay.stat().st_size


def put_older_copy_back(home: Home) -> None:
    copy = home.replay.read_bytes()
    with closing(ReplayBuffer(home.replay)) as buffer:
        begin_epoch(home, buffer)
    home.replay.write_bytes(copy)


def lose_release(home: Home) -> None:
    with closing(EventLog(home.events)) as events:
        events.write("released", group=ready_ids(home).pop(), reason="stale")


def lose_by(statement: str) -> Callable[[Home], object]:
    return lambda home: query(home.replay, statement)


DAMAGES: dict[str, tuple[Callable[[Home], object], str]] = {
    "torn page": (lambda home: overwrite(home.replay, size_of(home) // PAGE // 2 * PAGE, noise(PAGE)), ""),
    "cut off": (lambda home: os.truncate(home.replay, size_of(home) * 3 // 4), ""),
    # SQLite's check does not find this
    "invalid text": (lose_by("UPDATE groups SET task = CAST(x'6d61ff6c' AS TEXT) WHERE arrival IN (9, 10, 50)"), ""),
    "not a database": (lambda home: home.replay.write_bytes(noise(size_of(home))), ""),
    "no column": (lose_by("ALTER TABLE groups DROP COLUMN checksum"), "table groups has no column checksum"),
    "empty": (lambda home: os.truncate(home.replay, 0), "missing"),
    "missing": (lambda home: home.replay.unlink(), "missing"),
    "older copy": (put_older_copy_back, "before the last start"),
    # A damaged write-ahead log returns the buffer to an earlier state. The event log has the later one.
    "no admission": (lose_by("DELETE FROM groups WHERE arrival = (SELECT max(arrival) FROM groups)"), "the event log"),
    "no use": (lose_by("UPDATE groups SET state = 'ready', step = NULL WHERE step = 1"), "the event log has"),
    "no release": (lose_release, "the event log has"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_incomplete_buffer_starts_empty_and_nothing_is_used_twice(home, damage, caplog):
    do_damage, why = DAMAGES[damage]
    do_damage(home)
    damaged = home.replay.read_bytes() if home.replay.exists() else b""
    recover(home)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    if damaged:
        moved = next(home.damaged.glob("*/replay.sqlite")).read_bytes()
        assert moved[: len(damaged)] == damaged, "the kept file differs from the damaged one"
    assert_reported(home, why)
    assert_reset(home)


@pytest.mark.parametrize("fields", [{"group": "q" + "0" * 63}, {"group": "abc"}, {"group": "0" * 64, "number": 2**70}])
def test_a_damaged_line_of_the_event_log_is_no_damage_of_the_buffer(home, fields):
    with home.events.open("a") as log:
        log.write(json.dumps({"time": 1, "event": "admitted", "sender": ANN.peer_id, **fields}) + "\n")
    recover(home)
    assert len(stored(home)) == NUM_GROUPS


def test_a_new_home_without_a_buffer_is_no_damage(tmp_path):
    home = Home(tmp_path / "new")
    with opened_home(home):
        assert not home.replay.exists() and not home.events.exists()


@pytest.mark.parametrize("change", ["prune", "start", "step_lost"])
def test_pruned_groups_and_those_of_lost_steps_are_no_damage(home, change):
    """A learner that resumes at an older checkpoint makes the groups of later steps READY again."""
    with closing(ReplayBuffer(home.replay)) as buffer, closing(EventLog(home.events)) as events:
        if change == "prune":
            buffer.reconcile(1)
            assert buffer.prune(max_disk_bytes=1) == 30
        else:
            events.write(change, step=2)
            assert buffer.reconcile(0) == 30
    recover(home)
    assert not events_of(home, "recovered")


@pytest.mark.parametrize("has_log", [False, True])
def test_a_reset_that_was_interrupted_is_continued(home, monkeypatch, has_log):
    overwrite(home.replay, 8 * PAGE, noise(PAGE))
    log = home.replay.with_name("replay.sqlite-wal")

    def die(folder):
        raise OSError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "sync_to_disk", die)
        with pytest.raises(OSError, match="power"):
            recover(home)
    assert not home.replay.exists()
    if has_log:  # the file was moved, its log was not
        log.write_bytes(noise(PAGE))
    recover(home)
    assert_reset(home)
    assert not log.exists()


@pytest.mark.parametrize(
    "damage", ["envelope = zeroblob(99)", "rewards = CAST(x'00001041' || substr(rewards, 5) AS BLOB)", "own = 1 - own"]
)
def test_a_group_that_changed_on_disk_is_released(home, damage):
    (first, *_) = ready_ids(home)
    query(home.replay, f"UPDATE groups SET {damage} WHERE id = x'{first}'")
    if "envelope" in damage:
        with closing(ReplayReader(home.replay)) as reader:
            assert reader.envelopes([bytes.fromhex(first)]) == [], "the damaged group is served"
    changed = pytest.raises(FtisError, match=f"{first[:12]} changed on disk: start again")
    with closing(ReplayBuffer(home.replay)) as buffer, changed:
        buffer.take(2, own=99, foreign=99)
    recover(home)
    assert first not in ready_ids(home)
    assert [(event["group"], event["reason"]) for event in events_of(home, "released")] == [(first, "damaged")]


@pytest.mark.parametrize(("name", "offset"), [("replay", 18), ("peers", 61)], ids=["format", "schema version"])
def test_an_invalid_header_is_damage(home, name, offset):
    ReputationStore(home.peers).close()
    path = getattr(home, name)
    overwrite(path, offset, b"\x77")
    with opened_home(home):
        recover(home)
    assert [event["file"] for event in events_of(home, "recovered")] == [path.name]
    assert not integrity.find_damage(path)


def test_all_peers_are_new_after_damage_to_their_file(home):
    with closing(ReputationStore(home.peers)) as store:
        store.save(peers_with_false_claims(200), ReceiptBook("me"))
    overwrite(home.peers, 8 * PAGE, noise(PAGE))
    recover(home)
    with closing(ReputationStore(home.peers)) as store:
        store.load(again := ReputationTable(), now=1e9)
    assert list(again) == []
    assert [event["file"] for event in events_of(home, "recovered")] == ["peers.sqlite"]
    assert len(list(home.damaged.glob("*/peers.sqlite"))) == 1


def peers_with_false_claims(count: int) -> ReputationTable:
    table = ReputationTable()
    for number in range(count):
        table.note(f"peer{number}", Behaviour.FALSE_CLAIM, now=1e9)
    return table


def test_a_peers_file_that_another_program_holds_is_saved_later(home, caplog):
    table = peers_with_false_claims(1)
    with closing(ReputationStore(home.peers)) as store:
        with hold(home.peers):
            store.save(table, ReceiptBook("me"))
            store.save(table, ReceiptBook("me"))
            assert table.changed == {"peer0"}
        assert caplog.text.count("held by another program") == 1
        store.save(table, ReceiptBook("me"))
        assert not table.changed


def test_a_buffer_that_another_program_holds_is_not_reported_as_damaged(home, monkeypatch):
    monkeypatch.setattr("ftis_node.replay.database.BUSY_TIMEOUT_S", 0.1)
    with hold(home.replay), pytest.raises(MachineError, match="held by another program"):
        ReplayBuffer(home.replay)


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock of the database, like another program that writes to it."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("ROLLBACK")
    db.close()


def add_checkpoint(home: Home, *, run_id: str) -> None:
    mark(home, epoch=0)
    folder = home.checkpoints / "step-00000004"
    folder.mkdir()
    (folder / "state.json").write_text(f'{{"owner": {{"run_id": "{run_id}"}}}}')
    (folder / "COMPLETE").touch()


@pytest.mark.parametrize("damage", ["syntax", "value", "bytes"])
def test_a_damaged_manifest_is_refused_until_the_run_is_named(home, damage):
    manifest = load_manifest("arithmetic-ftis")
    add_checkpoint(home, run_id=manifest.run_id)
    text = manifest.to_toml()
    value = text.replace(f"group_size = {manifest.sampling.group_size}", "group_size = 5")
    home.run_toml.write_bytes({"syntax": text[:40].encode(), "value": value.encode(), "bytes": b"\xff\xfe\x00"}[damage])
    with pytest.raises(DamagedError, match=f"run.toml is damaged .*--run and the manifest of run {manifest.run_id}"):
        plan_run(None, None, home=home)
    with pytest.raises(ConfigError, match=f"belongs to run {manifest.run_id}"):
        plan_run("gsm8k-ftis", None, home=home)
    assert plan_run("arithmetic-ftis", None, home=home).manifest.run_id == manifest.run_id


def test_a_clock_that_is_set_back_does_not_extend_a_ban(home):
    table, again = ReputationTable(), ReputationTable()
    table.ban("peer", 600.0, now=1e9)
    with closing(ReputationStore(home.peers)) as store:
        store.save(table, ReceiptBook("me"))
        store.load(again, now=1e9 - 7200)
    assert again.is_banned("peer", now=1e9 - 7200)
    assert not again.is_banned("peer", now=1e9 - 7200 + 601)


def test_the_steady_clock_does_not_jump_and_reports_a_jump_once(monkeypatch):
    clock = SteadyClock()
    before = clock.now()
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + 3600.0)
    assert clock.now() == pytest.approx(before, abs=60)
    assert clock.jump_s() == pytest.approx(3600.0, abs=2)
    assert clock.jump_s() is None


def test_a_start_on_a_full_disk_reports_no_damage(home, monkeypatch):
    def fail_on_a_full_disk(home):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(home_opening, "replace_files", fail_on_a_full_disk)
    with pytest.raises(MachineError, match="^the disk is full"), opened_home(home):
        pass
