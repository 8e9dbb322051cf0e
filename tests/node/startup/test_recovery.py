"""A home whose files a disk has damaged: what can be read is saved, nothing is used twice, and a person hears of it."""

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
from ftis_node.config.home_files import HOME_SCHEMA, mark_schema
from ftis_node.config.limits import AccessSection
from ftis_node.config.manifest import load_manifest
from ftis_node.errors import ConfigError, DamagedError, FtisError, MachineError
from ftis_node.node.peers.store import PeerStore
from ftis_node.node.protocols import NullLearner
from ftis_node.node.startup import migrations as upgrade
from ftis_node.node.startup.recovery import log_unknown_steps, release_damaged, rescue_files
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
from tests.node.training.test_token_budget import live, manifest_of
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
    """A buffer of 60 groups of which a step has used the first 30, and the trail of it."""
    home = Home(tmp_path / "home")
    home.create()
    buffer, trail = ReplayBuffer(home.replay), EventLog(home.events)
    trail.write("start", peer=ME.peer_id)
    admit(buffer, trail, GROUPS[:30])
    use(buffer, trail, step=1)
    admit(buffer, trail, GROUPS[30:])
    buffer.close()
    trail.close()
    return home


def admit(buffer: ReplayBuffer, trail: EventLog, groups: list[Accepted]) -> None:
    buffer.admit_many([(group, group.group.sender == ME.peer_id) for group in groups])
    for one in groups:
        own, number = one.group.sender == ME.peer_id, one.group.number
        trail.write("admitted", group=one.envelope.id, own=own, sender=one.group.sender, number=number)


def use(buffer: ReplayBuffer, trail: EventLog, *, step: int) -> None:
    write_taken(trail, buffer.take(step, own=15, foreign=15).groups, step=step)
    trail.write("step", step=step, loss=float("nan"))


def heal(home: Home, *, step: int = 1, last_groups: list[bytes] | None = None) -> None:
    """What a start does; the learner's checkpoint is that of `step`, and names `last_groups`."""
    rescue_files(home)
    buffer, trail = ReplayBuffer(home.replay), EventLog(home.events)
    release_damaged(buffer, trail)
    buffer.claim_used(read_event_log_summary(home.events).used)
    buffer.reconcile(step, last_groups)
    buffer.close()
    trail.close()


def told(home: Home, name: str) -> list[dict[str, object]]:
    return read_events(home.events, name=name)


def trained(home: Home) -> int:
    reader = ReplayReader(home.replay)
    try:
        return reader.figures().released.get("trained", 0)
    finally:
        reader.close()


def used_ids(home: Home) -> set[str]:
    return {str(event["group"]) for event in told(home, "taken")}


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


def test_a_sound_home_is_left_alone(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    before = ready_ids(home)
    heal(home)
    assert ready_ids(home) == before
    assert (trained(home), len(before)) == (30, 30)
    assert not told(home, "recovered") and not told(home, "buffer_rolled_back") and not caplog.text
    assert not home.damaged.exists()


def made_now(number: int) -> Accepted:
    """Return a group of a peer, made now."""
    return accepted(ANN, number, created_at=int(time.time()) + 2)


def assert_reset(home: Home) -> None:
    """Assert that the buffer is sound and empty, and that it takes no group again and gives no number again."""
    assert not integrity.find_damage(home.replay)
    assert not ready_ids(home) and trained(home) == 0
    buffer = ReplayBuffer(home.replay)
    assert buffer.last_number() >= max(NUM_GROUPS - 1, int(time.time()) - 60), "peers take each number once"
    assert buffer.prompt_position() == NUM_GROUPS // 2, "the prompt after those of the own groups"
    assert not any(buffer.admit_many([(group, False) for group in GROUPS])), "made before the reset"
    with transaction(buffer._db):
        assert buffer._insert(made_now(NUM_GROUPS + 2), own=False)
        assert buffer._insert(accepted(ME, buffer.last_number() + 1), own=True), "own groups are made after the start"
        buffer._db.execute("DELETE FROM groups")
    buffer.close()


def harm_file(path: Path, harm: str) -> None:
    size = path.stat().st_size
    match harm:
        case "torn page":
            overwrite(path, size // PAGE // 2 * PAGE, noise(PAGE))
        case "flipped bytes":
            overwrite(path, 5 * PAGE, bytes(byte ^ 0xFF for byte in path.read_bytes()[5 * PAGE : 5 * PAGE + 40]))
        case "cut off":
            os.truncate(path, size * 3 // 4)
        case "no text":  # SQLite's own check does not find this
            execute(path, "UPDATE groups SET task = CAST(x'6d61ff6c' AS TEXT) WHERE number IN (9, 10, 50)")
        case "no database":
            path.write_bytes(noise(size))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("harm", ["torn page", "flipped bytes", "cut off", "no text", "no database"])
def test_a_damaged_buffer_starts_empty_and_nothing_is_used_twice(
    home: Home, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm_file(home.replay, harm)
    harmed = home.replay.read_bytes()
    heal(home)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert_reset(home)
    (event,) = told(home, "recovered")
    assert (event["file"], event["num_saved"]) == ("replay.sqlite", 0)
    kept = next(home.damaged.glob("*/replay.sqlite")).read_bytes()
    assert kept[: len(harmed)] == harmed, "the file as it was"
    heal(home)
    assert len(told(home, "recovered")) == 1 and not told(home, "buffer_rolled_back"), "reset once"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_missing_buffer_starts_empty_and_nothing_is_used_twice(home: Home, *, is_there: bool) -> None:
    if is_there:
        os.truncate(home.replay, 0)
    else:
        home.replay.unlink()
    heal(home)
    assert_reset(home)
    assert told(home, "buffer_rolled_back")[0]["num_lost"] == NUM_GROUPS
    heal(home)
    assert len(told(home, "buffer_rolled_back")) == 1


def test_at_most_two_damaged_files_are_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for second in range(3):
        monkeypatch.setattr(integrity, "FOLDER_TIME", f"2026-{second}")
        harm_file(home.replay, "no database")
        heal(home)
    assert sorted(path.name for path in home.damaged.iterdir()) == ["replay.sqlite-2026-1", "replay.sqlite-2026-2"]


def test_a_number_is_not_given_twice_if_the_clock_was_set_back(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 7.0)
    harm_file(home.replay, "no database")
    heal(home)
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
        harm_file(home.replay, "no database")
        heal(home)
    heal(home)
    buffer = ReplayBuffer(home.replay)
    assert not any(buffer.admit_many([(group, False) for group in GROUPS])), "the event log has them"
    assert buffer.admit(accepted(ANN, NUM_GROUPS + 2, created_at=int(time.time()) + 60), own=False)
    buffer.close()


def test_a_reset_that_was_cut_off_is_taken_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite(home.replay, 8 * PAGE, noise(PAGE))
    with monkeypatch.context() as patch:
        patch.setattr(integrity, "_fill_up", lambda path: (_ for _ in ()).throw(OSError("the power goes")))
        with pytest.raises(OSError, match="power"):
            heal(home)
    assert home.replay.exists()
    heal(home)
    assert_reset(home)


@pytest.mark.parametrize("moved", ["the file", "the file, not its log"])
def test_a_reset_that_was_cut_off_without_a_file_in_place_is_taken_up(
    home: Home, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    overwrite(home.replay, 8 * PAGE, noise(PAGE))
    log = home.replay.with_name("replay.sqlite-wal")

    def die(folder: Path) -> None:
        if folder.parent == home.damaged:
            raise OSError("the power goes")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "sync_to_disk", die)
        with pytest.raises(OSError, match="power"):
            heal(home)
    assert not home.replay.exists()
    if moved == "the file, not its log":
        log.write_bytes(noise(PAGE))
    heal(home)
    assert_reset(home)
    assert not list(home.root.glob("*.new")) and not log.exists()


@pytest.mark.parametrize(
    "harm",
    [
        "envelope = zeroblob(99)",
        "prompt_ids = CAST(x'ffffff7f' || substr(prompt_ids, 5) AS BLOB)",
        "rewards = replace(rewards, '1.0', '9.0')",
        "policy_version = policy_version + 4096",
        "own = 1 - own",
    ],
)
def test_a_group_that_is_not_what_was_stored_is_let_go(home: Home, harm: str) -> None:
    (first, *_) = ready_ids(home)
    with sqlite3.connect(home.replay) as db:
        db.execute(f"UPDATE groups SET {harm} WHERE id = ?", (bytes.fromhex(first),))
    db.close()
    if "envelope" in harm:
        reader = ReplayReader(home.replay)
        assert reader.envelopes([bytes.fromhex(first)]) == [], "nobody gets it"
        reader.close()
    buffer = ReplayBuffer(home.replay)
    with pytest.raises(FtisError, match=f"{first[:12]} changed on disk: start again"):
        buffer.take(2, own=99, foreign=99)
    buffer.close()
    heal(home)
    assert first not in ready_ids(home)
    assert [event["group"] for event in told(home, "released")] == [first]
    assert told(home, "released")[0]["reason"] == "damaged"


@pytest.mark.parametrize("column", ["checksum", "failed_steps"])
def test_groups_of_a_version_that_noted_less_are_kept(home: Home, *, column: str) -> None:
    execute(home.replay, f"ALTER TABLE groups DROP COLUMN {column}")
    before = ready_ids(home)
    heal(home)
    assert ready_ids(home) == before


def test_commits_that_a_write_ahead_log_lost_are_missed(home: Home, tmp_path: Path) -> None:
    """The buffer as it was before the step; the trail knows of the step."""
    early = Home(tmp_path / "early")
    early.create()
    buffer = ReplayBuffer(early.replay)
    buffer.admit_many([(group, group.group.sender == ME.peer_id) for group in GROUPS[:30]])
    buffer.close()
    early.replay.replace(home.replay)
    heal(home)
    assert_reset(home)
    (behind,) = told(home, "buffer_rolled_back")
    assert (behind["num_lost"], behind["num_used"], behind["last_number"]) == (30, 0, 59)
    heal(home)
    assert len(told(home, "buffer_rolled_back")) == 1, "told once"


def test_a_lost_number_of_an_own_group_resets_the_buffer(home: Home) -> None:
    execute(home.replay, "UPDATE totals SET value = 9 WHERE name = 'last_number'")
    heal(home)
    assert_reset(home)


def test_a_used_group_whose_use_was_lost_is_ready_again_only_if_its_step_is_lost(home: Home) -> None:
    """The disk lost the commit that took the groups of step 1; the event log has it."""
    lose = f"UPDATE groups SET state = 'ready', step = NULL, reason = NULL WHERE number <= {NUM_GROUPS}"
    execute(home.replay, lose)
    heal(home, step=1)
    assert (trained(home), len(ready_ids(home))) == (30, 30)
    execute(home.replay, lose)
    heal(home, step=0)
    assert (trained(home), len(ready_ids(home))) == (0, 60)
    assert not told(home, "buffer_rolled_back")


@pytest.mark.parametrize("name", ["admitted", "step"])
def test_a_damaged_line_and_then_a_lost_buffer_bring_no_used_group_back(home: Home, name: str) -> None:
    """`taken` says where the group came from, too, and a later step that this one was done."""
    buffer, trail = ReplayBuffer(home.replay), EventLog(home.events)
    use(buffer, trail, step=2)
    trail.write("taken", group=b"another", step=3)
    trail.write("step", step=3, loss=0.5)
    buffer.close()
    trail.close()
    lines = home.events.read_bytes().splitlines(keepends=True)
    *_, at, _ = (number for number, line in enumerate(lines) if f'"event":"{name}"'.encode() in line)
    lines[at] = b"\xff" * (len(lines[at]) - 1) + b"\n"
    home.events.write_bytes(b"".join(lines))
    home.replay.unlink()
    heal(home)
    buffer = ReplayBuffer(home.replay)
    again = buffer.admit_many([(group, False) for group in GROUPS])
    buffer.close()
    assert not any(again)


def test_a_lost_group_of_a_step_that_only_the_checkpoint_knows_is_not_admitted_again(home: Home) -> None:
    """The node ended between the checkpoint and the line of its step, and the disk lost the groups of that step."""
    buffer, trail = ReplayBuffer(home.replay), EventLog(home.events)
    taken = [group.id for group in buffer.take(2, own=5, foreign=5).groups]
    buffer.close()
    for one in GROUPS:
        if one.envelope.id in taken:
            trail.write("taken", group=one.envelope.id, step=2, sender=one.group.sender, number=one.group.number)
            execute(home.replay, f"DELETE FROM groups WHERE id = x'{one.envelope.id.hex()}'")
    trail.close()
    heal(home, step=2, last_groups=taken)
    assert_reset(home)
    assert told(home, "buffer_rolled_back")[0]["num_lost"] == 10


@pytest.mark.parametrize("last_step", [1, 9])
def test_a_checkpoint_that_differs_from_the_event_log_resets_no_buffer(home: Home, last_step: int) -> None:
    """A restored checkpoint is of step 7, and by its word that step used groups of the log's step 1, or 9."""
    buffer, trail = ReplayBuffer(home.replay), EventLog(home.events)
    if last_step > 1:
        use(buffer, trail, step=last_step)
    buffer.close()
    trail.close()
    heal(home, step=last_step)
    groups = [bytes.fromhex(str(event["group"])) for event in told(home, "taken") if event["step"] == last_step]
    for _ in range(2):
        heal(home, step=7, last_groups=groups[:3])
    assert not told(home, "buffer_rolled_back")
    assert trained(home) == (30 if last_step == 1 else 33), "of the other groups only those of step 9 are READY again"


@pytest.mark.parametrize("schema", [1, 2])
def test_what_an_older_version_pruned_is_not_missed_after_the_upgrade(home: Home, schema: int) -> None:
    """Buffers of schema 1 and 2 did not note what they pruned; the event log still has those groups."""
    buffer = ReplayBuffer(home.replay)
    buffer.release_step(1, ReleaseReason.TRAINED)
    buffer.close()
    later = ("weights_of", "checksum", "failed_steps", *(["text_token_ids"] if schema == 1 else []))
    statements = ("DROP TABLE forgotten", *(f"ALTER TABLE groups DROP COLUMN {column}" for column in later))
    for statement in ("DELETE FROM groups WHERE arrival <= 20", *statements, f"PRAGMA user_version = {schema}"):
        execute(home.replay, statement)
    mark_schema(home, schema)
    before = ready_ids(home)
    for _ in range(2):
        with upgrade.opened(home):
            assert not told(home, "buffer_rolled_back")
    assert ready_ids(home) == before
    buffer = ReplayBuffer(home.replay)
    assert not any(buffer.admit_many([(group, False) for group in GROUPS])), "pruned ones were used"
    buffer.close()


@pytest.mark.parametrize("harm", ["step = 77", "reason = 'tra)ned'"])
def test_a_turned_bit_in_what_is_noted_of_a_used_group_does_not_bring_it_back(home: Home, harm: str) -> None:
    """Step and reason change over a group's life, so no checksum covers them; the trail knows them, too."""
    buffer, (used, *_) = ReplayBuffer(home.replay), used_ids(home)
    buffer.release_step(1, ReleaseReason.TRAINED)
    buffer.close()
    execute(home.replay, f"UPDATE groups SET {harm} WHERE id = x'{used}'")
    heal(home)
    assert_reset(home)
    assert [behind["num_used"] for behind in told(home, "buffer_rolled_back")] == [1]
    heal(home)
    assert len(told(home, "buffer_rolled_back")) == 1


def test_a_group_that_was_given_up_stays_so_where_the_disk_lost_only_that(home: Home) -> None:
    (given_up, *_) = ready_ids(home)
    trail = EventLog(home.events)
    trail.write("released", group=given_up, reason="stale")
    trail.close()
    heal(home)
    assert_reset(home)
    assert [behind["num_used"] for behind in told(home, "buffer_rolled_back")] == [1]


def test_a_step_that_is_done_again_is_not_done_until_it_is_told_again(home: Home) -> None:
    """The learner fell back to an older checkpoint. The node that ends in that step tells of it at its next start."""
    buffer, trail = ReplayBuffer(home.replay), EventLog(home.events)
    use(buffer, trail, step=2)
    trail.write("start", peer=ME.peer_id)
    assert read_event_log_summary(home.events).step == 2
    trail.write("taken", group=b"another", step=1)
    assert (read_event_log_summary(home.events).step, read_event_log_summary(home.events).used) == (0, [])
    buffer.close()
    trail.close()


def test_a_group_that_was_damaged_after_a_step_had_used_it_is_a_used_one(home: Home) -> None:
    """It was TAKEN when the node ended; the checkpoint has it, and the trail names it for this step."""
    (damaged, *_), used = used_ids(home), [bytes.fromhex(name) for name in used_ids(home)]
    execute(home.replay, f"UPDATE groups SET envelope = zeroblob(99) WHERE id = x'{damaged}'")
    heal(home, step=1, last_groups=used)
    assert (trained(home), len(ready_ids(home))) == (30, 30)


def test_a_turned_bit_in_the_schema_of_the_buffer_ends_no_node(home: Home) -> None:
    """SQLite's check does not compare names."""
    data = home.replay.read_bytes()
    turned, into = b"policy_version INTEGER", b"policy_wersion INTEGER"
    assert turned in data
    home.replay.write_bytes(data.replace(turned, into))
    heal(home)
    buffer, more = ReplayBuffer(home.replay), made_now(998)
    assert buffer.admit(more, own=False)
    assert more.envelope.id in {group.id for group in buffer.take(2, own=0, foreign=99).groups}
    buffer.close()


def test_a_turned_bit_in_the_schema_of_the_peers_ends_no_node(home: Home) -> None:
    """SQLite's error message has the name, which is no text: reading the message raises UnicodeDecodeError."""
    store, standings = PeerStore(home.peers), ReputationTable(AccessSection())
    standings.note("peer", Behaviour.FALSE_CLAIM, now=1e9)
    store.save(standings)
    store.close()
    data = home.peers.read_bytes()
    overwrite(home.peers, data.index(b"CREATE TABLE peers") + len(b"CREATE TABLE "), b"peers (\xf7")
    heal(home)
    assert [event["file"] for event in told(home, "recovered")] == ["peers.sqlite"]
    store, standings = PeerStore(home.peers), ReputationTable(AccessSection())
    store.load(standings, now=1e9)
    store.save(standings)
    store.close()


@pytest.mark.parametrize("place", [18, 47, 61], ids=["format", "schema format", "schema version"])
@pytest.mark.parametrize("name", ["replay", "peers"])
def test_a_header_that_no_sqlite_wrote_is_damage(home: Home, name: str, place: int) -> None:
    PeerStore(home.peers).close()
    path = getattr(home, name)
    overwrite(path, place, b"\x77")
    with upgrade.opened(home):
        heal(home)
    assert [event["file"] for event in told(home, "recovered")] == [path.name]
    assert not integrity.find_damage(path)


def test_a_step_that_the_learner_lost_has_used_nothing(home: Home) -> None:
    buffer, trail = ReplayBuffer(home.replay), EventLog(home.events)
    write_taken(trail, buffer.take(2, own=5, foreign=5).groups, step=2)
    trail.write("step_lost", step=2)
    buffer.reconcile(1)
    buffer.close()
    trail.close()
    heal(home)
    assert len(ready_ids(home)) == 30


def test_lines_that_are_no_events_are_skipped_and_reported_once(home: Home) -> None:
    lines = home.events.read_bytes().splitlines(keepends=True)
    lines[4:4] = [b"\xff\x00 no event {\n", b'{"time": "never"}\n']
    home.events.write_bytes(b"".join(lines))
    heal(home)
    assert home.events.read_bytes().startswith(b"".join(lines)), "the log is as it was, and longer"
    assert read_event_log_summary(home.events).num_damaged == 2
    heal(home)
    home.events.write_bytes(b"".join(line for line in home.events.read_bytes().splitlines(True) if read_head(line)))
    assert [event["num_lost"] for event in told(home, "recovered")] == [2], "reported once"
    assert len(told(home, "admitted")) == NUM_GROUPS


@pytest.mark.parametrize(
    "reasons", ["CAST(x'7b226c696564ff' AS TEXT)", "'{\"false_claim\": []}'", "'{\"false_claim\": 1e999}'", "'[7]'"]
)
def test_peers_whose_texts_are_none_keep_their_standing(home: Home, reasons: str) -> None:
    store, standings = PeerStore(home.peers), ReputationTable(AccessSection())
    for number in range(3):
        standings.note(f"peer{number}", Behaviour.FALSE_CLAIM, now=1e9)
    store.save(standings)
    store.close()
    execute(home.peers, f"UPDATE peers SET reasons = {reasons} WHERE peer_id = 'peer1'")
    heal(home)
    again, store = ReputationTable(AccessSection()), PeerStore(home.peers)
    store.load(again, now=1e9)
    store.close()
    assert (
        again.record_of("peer1").reputation
        == again.record_of("peer2").reputation
        == standings.record_of("peer2").reputation
    )
    assert again.record_of("peer2").reasons == standings.record_of("peer2").reasons


def test_peers_that_can_be_read_keep_their_standing(home: Home) -> None:
    store, standings = PeerStore(home.peers), ReputationTable(AccessSection())
    for number in range(200):
        standings.note(f"peer{number}", Behaviour.FALSE_CLAIM, now=1e9)
    store.save(standings)
    store.close()
    overwrite(home.peers, 4 * PAGE, noise(PAGE))
    heal(home)
    again, store = ReputationTable(AccessSection()), PeerStore(home.peers)
    store.load(again, now=1e9)
    store.close()
    assert 80 <= len(again) < 200
    assert told(home, "recovered")[0]["num_saved"] == len(again)


def test_a_peer_book_that_another_program_holds_is_saved_later(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    store, standings = PeerStore(home.peers), ReputationTable(AccessSection())
    standings.note("peer", Behaviour.FALSE_CLAIM, now=1e9)
    with hold(home.peers):
        store.save(standings)
        store.save(standings)
        assert standings.changed == {"peer"}
    assert caplog.text.count("held by another program") == 1
    store.save(standings)
    assert not standings.changed
    store.close()


def test_a_buffer_that_another_program_holds_is_not_called_damaged(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftis_node.replay.database.BUSY_TIMEOUT_S", 0.1)
    with hold(home.replay), pytest.raises(MachineError, match="held by another program"):
        ReplayBuffer(home.replay)


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Another program is writing to the database."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("ROLLBACK")
    db.close()


def test_a_turned_bit_in_the_key_is_no_other_peer(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    identity = Identity.load_or_create(path)
    text = path.read_text()
    path.write_text(("0" if text[0] != "0" else "1") + text[1:])
    with pytest.raises(DamagedError, match="identity restore"):
        Identity.load(path)
    path.write_text(f"{identity.seed.hex()}\n")
    path.chmod(0o600)
    assert Identity.load_or_create(path) == identity, "a file of old, without the peer id"
    assert path.read_text() == text


def trained_home(home: Home, *, run_id: str) -> None:
    mark_schema(home, HOME_SCHEMA)
    folder = home.checkpoints / "step-00000004"
    folder.mkdir()
    (folder / "state.json").write_text(f'{{"owner": {{"run_id": "{run_id}"}}}}')
    (folder / "COMPLETE").touch()


@pytest.mark.parametrize("harm", ["syntax", "value", "bytes"])
def test_a_damaged_manifest_is_refused_until_the_run_is_named(home: Home, harm: str) -> None:
    manifest = load_manifest("arithmetic-ftis")
    trained_home(home, run_id=manifest.run_id)
    text = manifest.to_toml()
    value = text.replace(f"group_size = {manifest.sampling.group_size}", "group_size = 5")
    home.run_toml.write_bytes({"syntax": text[:40].encode(), "value": value.encode(), "bytes": b"\xff\xfe\x00"}[harm])
    with pytest.raises(DamagedError, match=f"run.toml is damaged .*--run and the manifest of run {manifest.run_id}"):
        plan_run(None, None, home=home)
    with pytest.raises(ConfigError, match=f"belongs to run {manifest.run_id}"):
        plan_run("gsm8k-ftis", None, home=home)
    assert plan_run("arithmetic-ftis", None, home=home).manifest.run_id == manifest.run_id


def test_a_home_that_has_trained_nothing_knows_its_run_by_its_last_status(home: Home) -> None:
    """As a generator's: it has no checkpoints."""
    manifest = load_manifest("arithmetic-ftis")
    mark_schema(home, HOME_SCHEMA)
    home.run_toml.write_text(manifest.to_toml()[:40])
    with pytest.raises(DamagedError, match="nothing was trained yet: remove it"):
        plan_run("arithmetic-ftis", None, home=home)
    home.status.write_text(f'{{"run": {{"id": "{manifest.run_id}"}}}}')
    with pytest.raises(DamagedError, match=f"--run and the manifest of run {manifest.run_id}"):
        plan_run(None, None, home=home)
    with pytest.raises(ConfigError, match=f"belongs to run {manifest.run_id}"):
        plan_run("gsm8k-ftis", None, home=home)
    assert plan_run("arithmetic-ftis", None, home=home).manifest.run_id == manifest.run_id
    mark_schema(home, HOME_SCHEMA - 1)
    with pytest.raises(DamagedError, match="nothing was trained yet"):
        plan_run("arithmetic-ftis", None, home=home)  # run ids were others then
    home.run_toml.unlink()
    assert plan_run("gsm8k-ftis", None, home=home).manifest.name == "gsm8k-ftis", "removed by hand: another run"


def test_a_clock_that_is_set_back_makes_no_ban_longer(home: Home) -> None:
    store, standings = PeerStore(home.peers), ReputationTable(AccessSection())
    standings.ban("peer", 600.0, now=1e9)
    store.save(standings)
    again = ReputationTable(AccessSection())
    store.load(again, now=1e9 - 7200)
    store.close()
    assert again.is_banned("peer", now=1e9 - 7200)
    assert not again.is_banned("peer", now=1e9 - 7200 + 601)


def test_the_steady_clock_does_not_jump_and_tells_of_a_jump_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    before = clock.now()
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + 3600.0)
    assert clock.now() == pytest.approx(before, abs=60)
    assert clock.jump_s() == pytest.approx(3600.0, abs=2)
    assert clock.jump_s() is None


def test_a_start_that_finds_no_room_says_that_and_nothing_of_damage(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_no_room(home: Home) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upgrade, "rescue_files", find_no_room)
    with pytest.raises(MachineError, match="^the disk is full"), upgrade.opened(home):
        pass


@pytest.mark.parametrize(
    ("step", "groups", "is_told"),
    [
        (3, ("ab",), False),
        (2, ("cd",), False),
        (4, ("ab", "cd"), False),
        (4, (), False),
        (4, ("cd",), True),
        (6, ("ab",), True),
    ],
)
def test_a_checkpoint_of_steps_that_the_trail_does_not_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, groups: tuple[str, ...], is_told: bool
) -> None:
    """The buffer has the group ab. One step more than the trail knows is what an end without warning leaves."""
    events = EventLog(tmp_path / "events.jsonl")
    state = msgspec.structs.replace(NullLearner(5).state, step=step, last_groups=groups)
    held = {b"\xab": object()}
    log_unknown_steps(state, done=3, holds=held.get, events=events)
    events.close()
    written = [(event["event"], event["step"], event["done"]) for event in read_events(tmp_path / "events.jsonl")]
    assert written == ([("steps_unknown", step, 3)] if is_told else [])
    assert ("the event log has step 3" in caplog.text) is is_told


async def test_checkpoints_and_the_model_of_another_home_in_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, model = manifest_of(foreign=0), save_tiny(tmp_path / "model")
    await live(tmp_path / "a", model, manifest=run, budget={"learn_steps": 2})
    assert "the event log has step" not in caplog.text
    shutil.copytree(tmp_path / "a" / "checkpoints", tmp_path / "b" / "checkpoints")
    renamed = shutil.copytree(model, tmp_path / "renamed")
    status = await live(tmp_path / "b", renamed, manifest=run, budget={"learn_steps": 2})
    assert status.learner.step == 2
    (told,) = read_events(tmp_path / "b" / "events.jsonl", name="steps_unknown")
    assert (told["step"], told["done"]) == (2, 0)
    assert "the event log has step 0" in caplog.text
