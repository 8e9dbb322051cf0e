"""A home with damaged files: readable data is saved, no group is used twice, and the damage is logged."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from ftis_node.config.home import Home
from ftis_node.config.home_files import mark_schema
from ftis_node.config.limits import AccessSection
from ftis_node.config.manifest import load_manifest
from ftis_node.errors import ConfigError, DamagedError, FtisError, MachineError
from ftis_node.node.peers.store import PeerStore
from ftis_node.node.protocols import NullLearner
from ftis_node.node.startup import recovery
from ftis_node.node.startup.recovery import log_unknown_steps, opened, release_damaged, rescue_files
from ftis_node.node.startup.run_plan import plan_run
from ftis_node.node.training.step_gate import write_taken
from ftis_node.records.identity import Identity
from ftis_node.replay import integrity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.database import transaction
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from ftis_node.swarm.reputation import Behaviour, ReputationTable
from ftis_node.telemetry.clock import SteadyClock
from ftis_node.telemetry.event_log_summary import read_event_log_summary
from ftis_node.telemetry.events import EventLog, read_events
from ftis_node.telemetry.history import read_head
from tests.models.tiny_models import save_tiny
from tests.node.training.test_token_budget import manifest_of, run_whole_node
from tests.replay.test_buffer import ANN, ME, accepted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftis_node.validation import Accepted

NUM_GROUPS = 60
PAGE = 4096
GROUPS = [accepted(ME if number % 2 else ANN, number) for number in range(1, NUM_GROUPS + 1)]


def noise(num_bytes: int) -> bytes:
    return random.Random(1).randbytes(num_bytes)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Make a home with a buffer of 60 groups, of which a step used the first 30, and its event log."""
    home = Home(tmp_path / "home")
    home.create()
    buffer, events = ReplayBuffer(home.replay), EventLog(home.events)
    events.write("start", peer=ME.peer_id)
    admit(buffer, events, GROUPS[:30])
    use(buffer, events, step=1)
    admit(buffer, events, GROUPS[30:])
    buffer.close()
    events.close()
    return home


def admit(buffer: ReplayBuffer, events: EventLog, groups: list[Accepted]) -> None:
    buffer.admit_many([(group, group.group.sender == ME.peer_id) for group in groups])
    for one in groups:
        own, number = one.group.sender == ME.peer_id, one.group.number
        events.write("admitted", group=one.envelope.id, own=own, sender=one.group.sender, number=number)


def use(buffer: ReplayBuffer, events: EventLog, *, step: int) -> None:
    write_taken(events, buffer.take(step, own=15, foreign=15).groups, step=step)
    events.write("step", step=step, loss=float("nan"))


def recover(home: Home, *, step: int = 1, last_groups: list[bytes] | None = None) -> None:
    """Recover the home like a start whose checkpoint is of `step` and names `last_groups`."""
    rescue_files(home)
    buffer, events = ReplayBuffer(home.replay), EventLog(home.events)
    release_damaged(buffer, events)
    buffer.claim_used(read_event_log_summary(home.events).used)
    buffer.reconcile(step, last_groups)
    buffer.close()
    events.close()


def events_of(home: Home, name: str) -> list[dict[str, object]]:
    return read_events(home.events, name=name)


def trained(home: Home) -> int:
    reader = ReplayReader(home.replay)
    try:
        return reader.figures().released.get("trained", 0)
    finally:
        reader.close()


def used_ids(home: Home) -> set[str]:
    return {str(event["group"]) for event in events_of(home, "taken")}


def ready_ids(home: Home) -> set[str]:
    reader = ReplayReader(home.replay)
    try:
        return {group.id for group in reader.list_groups(limit=1000, state="ready")}
    finally:
        reader.close()


def execute(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(statement)
    db.close()


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_an_undamaged_home_is_not_changed(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    before = ready_ids(home)
    recover(home)
    assert ready_ids(home) == before
    assert (trained(home), len(before)) == (30, 30)
    assert not events_of(home, "recovered") and not events_of(home, "buffer_rolled_back") and not caplog.text
    assert not home.damaged.exists()


def new_group(number: int) -> Accepted:
    """Return a group of a peer that was sampled now."""
    return accepted(ANN, number, created_at=int(time.time()) + 2)


def assert_reset(home: Home) -> None:
    """Assert that the buffer is undamaged and empty, admits no group again and uses no number again."""
    assert not integrity.find_damage(home.replay)
    assert not ready_ids(home) and trained(home) == 0
    buffer = ReplayBuffer(home.replay)
    assert buffer.last_number() >= max(NUM_GROUPS - 1, int(time.time()) - 60), "peers accept each number once"
    assert buffer.prompt_position() == NUM_GROUPS // 2, "not the prompt after those of the own groups"
    assert not any(buffer.admit_many([(group, False) for group in GROUPS])), (
        "a group from before the reset was admitted"
    )
    with transaction(buffer._db):
        assert buffer._insert(new_group(NUM_GROUPS + 2), own=False)
        assert buffer._insert(accepted(ME, buffer.last_number() + 1), own=True), (
            "an own group from after the start was refused"
        )
        buffer._db.execute("DELETE FROM groups")
    buffer.close()


def damage_file(path: Path, damage: str) -> None:
    size = path.stat().st_size
    match damage:
        case "torn page":
            overwrite(path, size // PAGE // 2 * PAGE, noise(PAGE))
        case "flipped bytes":
            overwrite(path, 5 * PAGE, bytes(byte ^ 0xFF for byte in path.read_bytes()[5 * PAGE : 5 * PAGE + 40]))
        case "cut off":
            os.truncate(path, size * 3 // 4)
        case "invalid text":  # SQLite's check does not find this
            execute(path, "UPDATE groups SET task = CAST(x'6d61ff6c' AS TEXT) WHERE number IN (9, 10, 50)")
        case "not a database":
            path.write_bytes(noise(size))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", ["torn page", "flipped bytes", "cut off", "invalid text", "not a database"])
def test_a_damaged_buffer_starts_empty_and_nothing_is_used_twice(
    home: Home, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage_file(home.replay, damage)
    damaged_bytes = home.replay.read_bytes()
    recover(home)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert_reset(home)
    (event,) = events_of(home, "recovered")
    assert (event["file"], event["num_saved"]) == ("replay.sqlite", 0)
    moved = next(home.damaged.glob("*/replay.sqlite")).read_bytes()
    assert moved[: len(damaged_bytes)] == damaged_bytes, "the kept file differs from the damaged one"
    recover(home)
    assert len(events_of(home, "recovered")) == 1 and not events_of(home, "buffer_rolled_back"), "reset twice"


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_missing_buffer_starts_empty_and_nothing_is_used_twice(home: Home, *, is_empty: bool) -> None:
    if is_empty:
        os.truncate(home.replay, 0)
    else:
        home.replay.unlink()
    recover(home)
    assert_reset(home)
    assert events_of(home, "buffer_rolled_back")[0]["num_lost"] == NUM_GROUPS
    recover(home)
    assert len(events_of(home, "buffer_rolled_back")) == 1


def test_at_most_two_damaged_files_are_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for second in range(3):
        monkeypatch.setattr(integrity, "FOLDER_TIME", f"2026-{second}")
        damage_file(home.replay, "not a database")
        recover(home)
    assert sorted(path.name for path in home.damaged.iterdir()) == ["replay.sqlite-2026-1", "replay.sqlite-2026-2"]


def test_no_number_is_used_twice_if_the_clock_was_set_back(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 7.0)
    damage_file(home.replay, "not a database")
    recover(home)
    buffer = ReplayBuffer(home.replay)
    assert buffer.last_number() == NUM_GROUPS - 1
    buffer.close()


@pytest.mark.parametrize("offset_s", [-1e9, 1e9])
def test_a_wrong_clock_at_the_reset_uses_no_group_twice_and_refuses_no_new_one(
    home: Home, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: now + offset_s)
        damage_file(home.replay, "not a database")
        recover(home)
    recover(home)
    buffer = ReplayBuffer(home.replay)
    assert not any(buffer.admit_many([(group, False) for group in GROUPS])), (
        "a group of the event log was admitted again"
    )
    assert buffer.admit(accepted(ANN, NUM_GROUPS + 2, created_at=int(time.time()) + 60), own=False)
    buffer.close()


def test_an_interrupted_reset_is_repeated(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite(home.replay, 8 * PAGE, noise(PAGE))
    with monkeypatch.context() as patch:
        patch.setattr(integrity, "_fill_up", lambda path: (_ for _ in ()).throw(OSError("no power")))
        with pytest.raises(OSError, match="power"):
            recover(home)
    assert home.replay.exists()
    recover(home)
    assert_reset(home)


@pytest.mark.parametrize("moved", ["the file", "the file, not its log"])
def test_a_reset_that_was_interrupted_without_a_file_in_place_is_repeated(
    home: Home, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    overwrite(home.replay, 8 * PAGE, noise(PAGE))
    log = home.replay.with_name("replay.sqlite-wal")

    def die(folder: Path) -> None:
        if folder.parent == home.damaged:
            raise OSError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "sync_to_disk", die)
        with pytest.raises(OSError, match="power"):
            recover(home)
    assert not home.replay.exists()
    if moved == "the file, not its log":
        log.write_bytes(noise(PAGE))
    recover(home)
    assert_reset(home)
    assert not list(home.root.glob("*.new")) and not log.exists()


@pytest.mark.parametrize(
    "damage",
    [
        "envelope = zeroblob(99)",
        "prompt_ids = CAST(x'ffffff7f' || substr(prompt_ids, 5) AS BLOB)",
        "rewards = CAST(x'00001041' || substr(rewards, 5) AS BLOB)",
        "policy_version = policy_version + 4096",
        "own = 1 - own",
    ],
)
def test_a_group_that_changed_on_disk_is_released(home: Home, damage: str) -> None:
    (first, *_) = ready_ids(home)
    with sqlite3.connect(home.replay) as db:
        db.execute(f"UPDATE groups SET {damage} WHERE id = ?", (bytes.fromhex(first),))
    db.close()
    if "envelope" in damage:
        reader = ReplayReader(home.replay)
        assert reader.envelopes([bytes.fromhex(first)]) == [], "the damaged group is served"
        reader.close()
    buffer = ReplayBuffer(home.replay)
    with pytest.raises(FtisError, match=f"{first[:12]} changed on disk: start again"):
        buffer.take(2, own=99, foreign=99)
    buffer.close()
    recover(home)
    assert first not in ready_ids(home)
    assert [event["group"] for event in events_of(home, "released")] == [first]
    assert events_of(home, "released")[0]["reason"] == "damaged"


@pytest.mark.parametrize("column", ["checksum", "failed_steps"])
def test_a_buffer_without_a_column_is_replaced(home: Home, *, column: str) -> None:
    execute(home.replay, f"ALTER TABLE groups DROP COLUMN {column}")
    recover(home)
    assert_reset(home)
    (event,) = events_of(home, "recovered")
    assert event["why"] == f"table groups has no column {column}"


def test_lost_commits_of_the_write_ahead_log_are_detected(home: Home, tmp_path: Path) -> None:
    """The buffer is from before the step. The event log has the step."""
    early = Home(tmp_path / "early")
    early.create()
    buffer = ReplayBuffer(early.replay)
    buffer.admit_many([(group, group.group.sender == ME.peer_id) for group in GROUPS[:30]])
    buffer.close()
    early.replay.replace(home.replay)
    recover(home)
    assert_reset(home)
    (behind,) = events_of(home, "buffer_rolled_back")
    assert (behind["num_lost"], behind["num_used"], behind["last_number"]) == (30, 0, 59)
    recover(home)
    assert len(events_of(home, "buffer_rolled_back")) == 1, "reported twice"


def test_a_lost_number_of_an_own_group_resets_the_buffer(home: Home) -> None:
    execute(home.replay, "UPDATE totals SET value = 9 WHERE name = 'last_number'")
    recover(home)
    assert_reset(home)


def test_a_group_whose_use_was_lost_is_ready_again_only_if_its_step_is_lost(home: Home) -> None:
    """The disk lost the commit that took the groups of step 1; the event log has it."""
    lose = f"UPDATE groups SET state = 'ready', step = NULL, reason = NULL WHERE number <= {NUM_GROUPS}"
    execute(home.replay, lose)
    recover(home, step=1)
    assert (trained(home), len(ready_ids(home))) == (30, 30)
    execute(home.replay, lose)
    recover(home, step=0)
    assert (trained(home), len(ready_ids(home))) == (0, 60)
    assert not events_of(home, "buffer_rolled_back")


@pytest.mark.parametrize("name", ["admitted", "step"])
def test_a_damaged_line_and_a_lost_buffer_bring_no_used_group_back(home: Home, name: str) -> None:
    """`taken` also names the group's sender, and a later step shows that this step was done."""
    buffer, events = ReplayBuffer(home.replay), EventLog(home.events)
    use(buffer, events, step=2)
    events.write("taken", group=b"another", step=3)
    events.write("step", step=3, loss=0.5)
    buffer.close()
    events.close()
    lines = home.events.read_bytes().splitlines(keepends=True)
    *_, at, _ = (number for number, line in enumerate(lines) if f'"event":"{name}"'.encode() in line)
    lines[at] = b"\xff" * (len(lines[at]) - 1) + b"\n"
    home.events.write_bytes(b"".join(lines))
    home.replay.unlink()
    recover(home)
    buffer = ReplayBuffer(home.replay)
    admitted = buffer.admit_many([(group, False) for group in GROUPS])
    buffer.close()
    assert not any(admitted)


def test_a_lost_group_of_a_step_that_only_the_checkpoint_has_is_not_admitted_again(home: Home) -> None:
    """The node ended between the checkpoint and the event of its step. The disk lost the groups of that step."""
    buffer, events = ReplayBuffer(home.replay), EventLog(home.events)
    taken = [group.id for group in buffer.take(2, own=5, foreign=5).groups]
    buffer.close()
    for one in GROUPS:
        if one.envelope.id in taken:
            events.write("taken", group=one.envelope.id, step=2, sender=one.group.sender, number=one.group.number)
            execute(home.replay, f"DELETE FROM groups WHERE id = x'{one.envelope.id.hex()}'")
    events.close()
    recover(home, step=2, last_groups=taken)
    assert_reset(home)
    assert events_of(home, "buffer_rolled_back")[0]["num_lost"] == 10


@pytest.mark.parametrize("last_step", [1, 9])
def test_a_checkpoint_that_differs_from_the_event_log_resets_no_buffer(home: Home, last_step: int) -> None:
    """A restored checkpoint is of step 7 and names groups that the log has in step 1, or 9."""
    buffer, events = ReplayBuffer(home.replay), EventLog(home.events)
    if last_step > 1:
        use(buffer, events, step=last_step)
    buffer.close()
    events.close()
    recover(home, step=last_step)
    groups = [bytes.fromhex(str(event["group"])) for event in events_of(home, "taken") if event["step"] == last_step]
    for _ in range(2):
        recover(home, step=7, last_groups=groups[:3])
    assert not events_of(home, "buffer_rolled_back")
    assert trained(home) == (30 if last_step == 1 else 33), (
        "only groups of step 9 that the checkpoint does not name are READY again"
    )


@pytest.mark.parametrize("damage", ["step = 77", "reason = 'tra)ned'"])
def test_a_changed_state_of_a_used_group_does_not_bring_it_back(home: Home, damage: str) -> None:
    """Step and reason change over a group's life, so no checksum covers them. The event log has them too."""
    buffer, (used, *_) = ReplayBuffer(home.replay), used_ids(home)
    buffer.release_step(1, ReleaseReason.TRAINED)
    buffer.close()
    execute(home.replay, f"UPDATE groups SET {damage} WHERE id = x'{used}'")
    recover(home)
    assert_reset(home)
    assert [behind["num_used"] for behind in events_of(home, "buffer_rolled_back")] == [1]
    recover(home)
    assert len(events_of(home, "buffer_rolled_back")) == 1


def test_a_released_group_stays_released_if_the_disk_lost_the_release(home: Home) -> None:
    (released, *_) = ready_ids(home)
    events = EventLog(home.events)
    events.write("released", group=released, reason="stale")
    events.close()
    recover(home)
    assert_reset(home)
    assert [behind["num_used"] for behind in events_of(home, "buffer_rolled_back")] == [1]


def test_a_repeated_step_counts_as_done_only_after_its_new_event(home: Home) -> None:
    """The learner fell back to an older checkpoint. A node that ends in that step reports it at its next start."""
    buffer, events = ReplayBuffer(home.replay), EventLog(home.events)
    use(buffer, events, step=2)
    events.write("start", peer=ME.peer_id)
    assert read_event_log_summary(home.events).step == 2
    events.write("taken", group=b"another", step=1)
    assert (read_event_log_summary(home.events).step, read_event_log_summary(home.events).used) == (0, [])
    buffer.close()
    events.close()


def test_a_group_that_was_damaged_after_its_use_counts_as_used(home: Home) -> None:
    """The group was TAKEN when the node ended. The checkpoint and the event log name it for this step."""
    (damaged, *_), used = used_ids(home), [bytes.fromhex(name) for name in used_ids(home)]
    execute(home.replay, f"UPDATE groups SET envelope = zeroblob(99) WHERE id = x'{damaged}'")
    recover(home, step=1, last_groups=used)
    assert (trained(home), len(ready_ids(home))) == (30, 30)


def test_a_flipped_bit_in_the_schema_of_the_buffer_does_not_end_the_node(home: Home) -> None:
    """SQLite's check does not compare names."""
    data = home.replay.read_bytes()
    name, changed = b"policy_version INTEGER", b"policy_wersion INTEGER"
    assert name in data
    home.replay.write_bytes(data.replace(name, changed))
    recover(home)
    buffer, group = ReplayBuffer(home.replay), new_group(998)
    assert buffer.admit(group, own=False)
    assert group.envelope.id in {stored.id for stored in buffer.take(2, own=0, foreign=99).groups}
    buffer.close()


def test_a_flipped_bit_in_the_schema_of_the_peers_file_does_not_end_the_node(home: Home) -> None:
    """SQLite's error message has the invalid name, so reading the message raises UnicodeDecodeError."""
    store, table = PeerStore(home.peers), ReputationTable(AccessSection())
    table.note("peer", Behaviour.FALSE_CLAIM, now=1e9)
    store.save(table)
    store.close()
    data = home.peers.read_bytes()
    overwrite(home.peers, data.index(b"CREATE TABLE peers") + len(b"CREATE TABLE "), b"peers (\xf7")
    recover(home)
    assert [event["file"] for event in events_of(home, "recovered")] == ["peers.sqlite"]
    store, table = PeerStore(home.peers), ReputationTable(AccessSection())
    store.load(table, now=1e9)
    store.save(table)
    store.close()


@pytest.mark.parametrize("offset", [18, 47, 61], ids=["format", "schema format", "schema version"])
@pytest.mark.parametrize("name", ["replay", "peers"])
def test_an_invalid_header_is_damage(home: Home, name: str, offset: int) -> None:
    PeerStore(home.peers).close()
    path = getattr(home, name)
    overwrite(path, offset, b"\x77")
    with opened(home):
        recover(home)
    assert [event["file"] for event in events_of(home, "recovered")] == [path.name]
    assert not integrity.find_damage(path)


def test_a_step_that_the_learner_lost_used_no_group(home: Home) -> None:
    buffer, events = ReplayBuffer(home.replay), EventLog(home.events)
    write_taken(events, buffer.take(2, own=5, foreign=5).groups, step=2)
    events.write("step_lost", step=2)
    buffer.reconcile(1)
    buffer.close()
    events.close()
    recover(home)
    assert len(ready_ids(home)) == 30


def test_invalid_lines_of_the_event_log_are_skipped_and_reported_once(home: Home) -> None:
    lines = home.events.read_bytes().splitlines(keepends=True)
    lines[4:4] = [b"\xff\x00 not an event {\n", b'{"time": "never"}\n']
    home.events.write_bytes(b"".join(lines))
    recover(home)
    assert home.events.read_bytes().startswith(b"".join(lines)), "old lines of the log changed"
    assert read_event_log_summary(home.events).num_damaged == 2
    recover(home)
    home.events.write_bytes(b"".join(line for line in home.events.read_bytes().splitlines(True) if read_head(line)))
    assert [event["num_lost"] for event in events_of(home, "recovered")] == [2], "reported twice"
    assert len(events_of(home, "admitted")) == NUM_GROUPS


@pytest.mark.parametrize(
    "reasons", ["CAST(x'7b226c696564ff' AS TEXT)", "'{\"false_claim\": []}'", "'{\"false_claim\": 1e999}'", "'[7]'"]
)
def test_peers_with_damaged_texts_keep_their_standing(home: Home, reasons: str) -> None:
    store, table = PeerStore(home.peers), ReputationTable(AccessSection())
    for number in range(3):
        table.note(f"peer{number}", Behaviour.FALSE_CLAIM, now=1e9)
    store.save(table)
    store.close()
    execute(home.peers, f"UPDATE peers SET reasons = {reasons} WHERE peer_id = 'peer1'")
    recover(home)
    again, store = ReputationTable(AccessSection()), PeerStore(home.peers)
    store.load(again, now=1e9)
    store.close()
    assert (
        again.record_of("peer1").reputation
        == again.record_of("peer2").reputation
        == table.record_of("peer2").reputation
    )
    assert again.record_of("peer2").reasons == table.record_of("peer2").reasons


def test_readable_peers_keep_their_standing(home: Home) -> None:
    store, table = PeerStore(home.peers), ReputationTable(AccessSection())
    for number in range(200):
        table.note(f"peer{number}", Behaviour.FALSE_CLAIM, now=1e9)
    store.save(table)
    store.close()
    overwrite(home.peers, 4 * PAGE, noise(PAGE))
    recover(home)
    again, store = ReputationTable(AccessSection()), PeerStore(home.peers)
    store.load(again, now=1e9)
    store.close()
    assert 80 <= len(again) < 200
    assert events_of(home, "recovered")[0]["num_saved"] == len(again)


def test_a_peers_file_that_another_program_holds_is_saved_later(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    store, table = PeerStore(home.peers), ReputationTable(AccessSection())
    table.note("peer", Behaviour.FALSE_CLAIM, now=1e9)
    with hold(home.peers):
        store.save(table)
        store.save(table)
        assert table.changed == {"peer"}
    assert caplog.text.count("held by another program") == 1
    store.save(table)
    assert not table.changed
    store.close()


def test_a_buffer_that_another_program_holds_is_not_reported_as_damaged(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_flipped_bit_in_the_key_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    identity = Identity.load_or_create(path)
    text = path.read_text()
    path.write_text(("0" if text[0] != "0" else "1") + text[1:])
    with pytest.raises(DamagedError, match="identity restore"):
        Identity.load(path)
    path.write_text(f"{identity.seed.hex()}\n")
    path.chmod(0o600)
    assert Identity.load_or_create(path) == identity, "an old file without the peer id"
    assert path.read_text() == text


def add_checkpoint(home: Home, *, run_id: str) -> None:
    mark_schema(home)
    folder = home.checkpoints / "step-00000004"
    folder.mkdir()
    (folder / "state.json").write_text(f'{{"owner": {{"run_id": "{run_id}"}}}}')
    (folder / "COMPLETE").touch()


@pytest.mark.parametrize("damage", ["syntax", "value", "bytes"])
def test_a_damaged_manifest_is_refused_until_the_run_is_named(home: Home, damage: str) -> None:
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


def test_a_home_without_a_checkpoint_belongs_to_the_run_of_its_last_status(home: Home) -> None:
    """The home of a generator has no checkpoints."""
    manifest = load_manifest("arithmetic-ftis")
    mark_schema(home)
    home.run_toml.write_text(manifest.to_toml()[:40])
    with pytest.raises(DamagedError, match="nothing was trained yet: remove it"):
        plan_run("arithmetic-ftis", None, home=home)
    home.status.write_text(f'{{"run": {{"id": "{manifest.run_id}"}}}}')
    with pytest.raises(DamagedError, match=f"--run and the manifest of run {manifest.run_id}"):
        plan_run(None, None, home=home)
    with pytest.raises(ConfigError, match=f"belongs to run {manifest.run_id}"):
        plan_run("gsm8k-ftis", None, home=home)
    assert plan_run("arithmetic-ftis", None, home=home).manifest.run_id == manifest.run_id
    home.run_toml.unlink()
    assert plan_run("gsm8k-ftis", None, home=home).manifest.name == "gsm8k-ftis", (
        "without run.toml another run is permitted"
    )


def test_a_clock_that_is_set_back_does_not_extend_a_ban(home: Home) -> None:
    store, table = PeerStore(home.peers), ReputationTable(AccessSection())
    table.ban("peer", 600.0, now=1e9)
    store.save(table)
    again = ReputationTable(AccessSection())
    store.load(again, now=1e9 - 7200)
    store.close()
    assert again.is_banned("peer", now=1e9 - 7200)
    assert not again.is_banned("peer", now=1e9 - 7200 + 601)


def test_the_steady_clock_does_not_jump_and_reports_a_jump_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    before = clock.now()
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + 3600.0)
    assert clock.now() == pytest.approx(before, abs=60)
    assert clock.jump_s() == pytest.approx(3600.0, abs=2)
    assert clock.jump_s() is None


def test_a_start_on_a_full_disk_reports_no_damage(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_a_full_disk(home: Home) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recovery, "rescue_files", fail_on_a_full_disk)
    with pytest.raises(MachineError, match="^the disk is full"), opened(home):
        pass


@pytest.mark.parametrize(
    ("step", "groups", "is_reported"),
    [
        (3, ("ab",), False),
        (2, ("cd",), False),
        (4, ("ab", "cd"), False),
        (4, (), False),
        (4, ("cd",), True),
        (6, ("ab",), True),
    ],
)
def test_a_checkpoint_of_steps_that_are_not_in_the_event_log_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, groups: tuple[str, ...], is_reported: bool
) -> None:
    """The buffer has the group ab. After a kill, the checkpoint may be one step ahead of the event log."""
    events = EventLog(tmp_path / "events.jsonl")
    state = msgspec.structs.replace(NullLearner(5).state, step=step, last_groups=groups)
    held = {b"\xab": object()}
    log_unknown_steps(state, done=3, holds=held.get, events=events)
    events.close()
    written = [(event["event"], event["step"], event["done"]) for event in read_events(tmp_path / "events.jsonl")]
    assert written == ([("steps_unknown", step, 3)] if is_reported else [])
    assert ("the event log has step 3" in caplog.text) is is_reported


async def test_checkpoints_of_another_home_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, model = manifest_of(foreign=0), save_tiny(tmp_path / "model")
    await run_whole_node(tmp_path / "a", model, manifest=run, budget={"learn_steps": 2})
    assert "the event log has step" not in caplog.text
    shutil.copytree(tmp_path / "a" / "checkpoints", tmp_path / "b" / "checkpoints")
    renamed = shutil.copytree(model, tmp_path / "renamed")
    status = await run_whole_node(tmp_path / "b", renamed, manifest=run, budget={"learn_steps": 2})
    assert status.learner.step == 2
    (event,) = read_events(tmp_path / "b" / "events.jsonl", name="steps_unknown")
    assert (event["step"], event["done"]) == (2, 0)
    assert "the event log has step 0" in caplog.text
