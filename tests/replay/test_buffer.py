"""The buffer on disk: what is acknowledged stays, what is taken is used once, what a crash interrupted comes back."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftis_node.errors import ConfigError, DamagedError
from ftis_node.records.codec import unpack_any, unpack_group
from ftis_node.records.envelope import seal_group
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import MAX_FAILED_STEPS, ReplayBuffer
from ftis_node.replay.lifecycle import Candidate, Freshness, ReleaseReason, choose_foreign, choose_own
from ftis_node.replay.reader import ReplayReader
from ftis_node.validation import Accepted
from tests.conftest import PROMPT_IDS, make_group, make_text_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftis_node.replay.rows import StoredGroup

ME = Identity.from_seed(bytes([1]) * 32)
ANN = Identity.from_seed(bytes([2]) * 32)
BOB = Identity.from_seed(bytes([3]) * 32)


def accepted(identity: Identity, number: int, **changes: object) -> Accepted:
    group = make_group(identity, number=number, **changes)
    envelope = seal_group(group, identity)
    return Accepted(envelope, envelope.to_bytes(), group, tuple(PROMPT_IDS))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.sqlite"


@pytest.fixture
def buffer(path: Path) -> Iterator[ReplayBuffer]:
    buffer = ReplayBuffer(path)
    yield buffer
    buffer.close()


@pytest.fixture
def reader(buffer: ReplayBuffer, path: Path) -> Iterator[ReplayReader]:
    reader = ReplayReader(path)
    yield reader
    reader.close()


def fill(buffer: ReplayBuffer, *, own: int, ann: int = 0, bob: int = 0) -> None:
    for identity, count in ((ME, own), (ANN, ann), (BOB, bob)):
        for number in range(1, count + 1):
            assert buffer.admit(accepted(identity, number), own=identity is ME)


def test_a_group_is_admitted_once(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    first = accepted(ANN, 1)
    assert buffer.admit(first, own=False)
    assert not buffer.admit(first, own=False)
    assert not buffer.admit(accepted(ANN, 1, created_at=1.0), own=False), "another body with a used number"
    assert reader.is_known(first.envelope.id)
    assert reader.has_number(ANN.peer_id, 1)
    assert not reader.has_number(ANN.peer_id, 2)
    assert reader.ready_counts() == (0, 1)


def test_a_step_takes_what_was_admitted_and_gets_it_back_unchanged(buffer: ReplayBuffer) -> None:
    fill(buffer, own=3, ann=2)
    taken = buffer.take(1, own=2, foreign=1).groups
    assert [group.own for group in taken] == [True, True, False]
    assert [group.number for group in taken] == [1, 2, 2], "own: oldest first; foreign: newest first"
    assert taken[0].prompt_ids == np.array(PROMPT_IDS, dtype="<i4").tobytes()
    assert taken[0].rewards == (1.0, 0.0)
    assert first_ids(taken[0]) == [10, 11, 2]


def first_ids(stored: StoredGroup) -> list[int]:
    return unpack_group(stored.body).completions[0].token_ids.tolist()


def test_a_group_told_as_text_comes_back_in_the_tokens_given_at_the_door(path: Path) -> None:
    told = make_text_group(ANN)
    envelope = seal_group(told, ANN)
    group = told.in_tokens([[10, 2], [7, 8, 9]])
    buffer = ReplayBuffer(path)
    assert buffer.admit(Accepted(envelope, envelope.to_bytes(), group, tuple(PROMPT_IDS), told.retells), own=False)
    assert buffer.admit(accepted(BOB, 1), own=False)
    buffer.close()
    buffer, reader = ReplayBuffer(path), ReplayReader(path)
    again, exact = sorted(buffer.take(1, own=0, foreign=2).groups, key=lambda taken: taken.sender != ANN.peer_id)
    assert again.text_token_ids == ((10, 2), (7, 8, 9))
    as_trained = unpack_any(again.body).in_tokens(again.text_token_ids)
    assert as_trained == group
    assert [completion.mean_logprob for completion in as_trained.completions] == [-0.25, -2.0]
    assert [len(completion.logprobs) for completion in as_trained.completions] == [0, 0]
    assert (as_trained.policy_version, as_trained.policy_version_newest) == (3, 4)
    assert exact.text_token_ids == ()
    assert unpack_group(exact.body).mean_logprobs == ()
    assert reader.envelopes([envelope.id]) == [envelope.to_bytes()], "as received"
    assert again.rewards == (1.0, 0.0)
    buffer.close()
    reader.close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_buffer_of_a_former_schema_is_kept(path: Path, buffer: ReplayBuffer, version: int) -> None:
    fill(buffer, own=1, ann=1)
    buffer.close()
    with sqlite3.connect(path) as connection:
        for column in ("text_token_ids", "weights_of")[version - 1 :]:
            connection.execute(f"ALTER TABLE groups DROP COLUMN {column}")
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    for _ in range(2):
        again = ReplayBuffer(path)
        assert again.last_number() == 1
        again.close()
    again = ReplayBuffer(path)
    assert [first_ids(group) for group in again.take(1, own=1, foreign=1).groups] == [
        [10, 11, 2],
        [10, 11, 2],
    ]
    again.close()


def test_no_group_is_taken_twice(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=4)
    first = {group.id for group in buffer.take(1, own=3, foreign=0).groups}
    second = {group.id for group in buffer.take(2, own=3, foreign=0).groups}
    assert (len(first), len(second)) == (3, 1)
    assert not first & second
    assert buffer.release_step(1, ReleaseReason.TRAINED) == 3
    assert not buffer.take(3, own=9, foreign=9).groups
    assert reader.figures().released == {"trained": 3}
    assert reader.figures().trained_own == 3


def test_the_checkpoint_decides_what_a_crash_undid(path: Path, buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=3, ann=3)
    for step in (1, 2, 3):
        buffer.take(step, own=1, foreign=1)
        if step < 3:
            buffer.release_step(step, ReleaseReason.TRAINED)
    buffer.close()
    resumed = ReplayBuffer(path)
    assert resumed.reconcile(1) == 4, "step 2 was trained and step 3 taken, but the checkpoint holds step 1 alone"
    assert reader.ready_counts() == (2, 2)
    assert reader.figures().trained_own == 1
    assert len(resumed.take(2, own=9, foreign=9).groups) == 4
    assert resumed.reconcile(2) == 0, "the checkpoint holds step 2: its groups are trained"
    assert reader.figures().trained_foreign == 3
    resumed.close()


def test_what_the_learner_fails_on_again_and_again_is_let_go(path: Path) -> None:
    first_life = ReplayBuffer(path)
    fill(first_life, own=2, ann=1)
    first_life.close()
    for _ in range(MAX_FAILED_STEPS):  # each failure ends the node
        with closing(ReplayBuffer(path)) as buffer:
            assert buffer.release_poisoned() == []
            taken = {group.id for group in buffer.take(1, own=1, foreign=1).groups}
            buffer.note_failed(1)
            assert buffer.release_poisoned() == [], "the checkpoint may still show that they were trained"
            buffer.reconcile(0)
    with closing(ReplayBuffer(path)) as buffer, closing(ReplayReader(path)) as reader:
        assert set(buffer.release_poisoned()) == taken
        assert len(taken) == 2
        assert reader.ready_counts() == (1, 0), "what was in none of these steps stays"
        assert reader.figures().released == {"poisoned": 2}


def test_a_failure_after_the_checkpoint_takes_nothing_from_it(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=1)
    buffer.take(1, own=1, foreign=0)
    for _ in range(MAX_FAILED_STEPS):
        buffer.note_failed(1)
    buffer.reconcile(1)
    assert buffer.release_poisoned() == []
    assert reader.figures().released == {"trained": 1}


@pytest.mark.parametrize("every_steps", [1, 3])
@pytest.mark.parametrize("dies", ["taken", "trained", "saved", "released"])
def test_wherever_a_node_dies_each_group_is_trained_once(path: Path, every_steps: int, dies: str) -> None:
    """What is trained is what the learner's weights saw: on disk are those of its newest checkpoint, no later ones."""
    buffer = ReplayBuffer(path)
    fill(buffer, own=12, ann=12)
    saved: list[list[bytes]] = []  # the groups of each step that the newest checkpoint holds
    weights: list[list[bytes]] = []
    all_goes_well = ["taken", "trained", "saved", "released"]
    for attempt in range(1, 40):
        step, has_died = len(weights) + 1, attempt in {2, 3, 5}
        happened = all_goes_well[: all_goes_well.index(dies) + 1] if has_died else all_goes_well
        groups = [group.id for group in buffer.take(step, own=2, foreign=2).groups]
        if not groups:
            break
        if "trained" in happened:
            weights = [*weights, groups]
        if "saved" in happened and step - len(saved) >= every_steps:
            saved = weights
        if "released" in happened:
            buffer.release_step(step, ReleaseReason.TRAINED)
            buffer.prune(max_disk_bytes=1, saved_step=len(saved))
        if has_died:
            buffer.close()
            buffer, weights = ReplayBuffer(path), saved
            buffer.reconcile(len(saved), saved[-1] if saved else [])
    buffer.close()
    trained = [group for groups in weights for group in groups]
    assert len(trained) == len(set(trained)) == 24
    assert attempt > 6


def test_a_checkpoint_is_believed_where_the_buffer_has_it_otherwise(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    """As after a restored backup: what the weights have seen is trained, and what they have not is ready."""
    fill(buffer, own=4)
    first, second = buffer.take(1, own=1, foreign=0).groups[0].id, buffer.take(2, own=1, foreign=0).groups[0].id
    buffer.release_step(1, ReleaseReason.TRAINED)
    buffer.release_step(2, ReleaseReason.TRAINED)
    third, fourth = (group.id for group in buffer.take(3, own=2, foreign=0).groups)
    buffer.reconcile(2)
    assert buffer.reconcile(2, [second]) == 0, "they agree"
    assert buffer.reconcile(2, [third]) == 1
    assert [group.id for group in buffer.take(3, own=9, foreign=0).groups] == [second, fourth]
    assert buffer.reconcile(3, [fourth, first]) == 1, "named by the checkpoint, whatever step the buffer had it under"
    assert [group.id for group in buffer.take(4, own=9, foreign=0).groups] == [second]
    assert reader.figures().trained_own == 3


def test_skipped_numbers_do_not_change_the_position_of_the_prompts(path: Path, buffer: ReplayBuffer) -> None:
    for number in (1, 2):
        buffer.admit(accepted(ME, number), own=True)
    buffer.raise_last_number(5_000)
    buffer.raise_last_number(4_000)
    buffer.admit(accepted(ME, 5_001), own=True)
    assert (buffer.last_number(), buffer.prompt_position()) == (5_001, 3)
    buffer.close()
    again = ReplayBuffer(path)
    assert (again.last_number(), again.prompt_position()) == (5_001, 3)
    again.close()


def test_a_buffer_that_an_older_version_has_reset_begins_at_the_first_prompt(path: Path, buffer: ReplayBuffer) -> None:
    buffer._db.execute("INSERT INTO totals VALUES ('last_number', 1700000000)")
    assert buffer.prompt_position() == 0
    buffer.close()
    again = ReplayBuffer(path)
    again.admit(accepted(ME, 1700000001), own=True)
    assert (again.last_number(), again.prompt_position()) == (1700000001, 1)
    again.close()


def test_numbers_go_on_after_a_restart(path: Path, buffer: ReplayBuffer) -> None:
    fill(buffer, own=5)
    buffer.close()
    resumed = ReplayBuffer(path)
    assert resumed.last_number() == 5
    resumed.close()


def test_old_groups_are_released_by_name(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    now = time.time()
    buffer.admit(accepted(ME, 1, created_at=now - 100), own=True)
    buffer.admit(accepted(ME, 2, created_at=now, versions=(1, 1)), own=True)
    buffer.admit(accepted(ME, 3, created_at=now, versions=(9, 9)), own=True)
    buffer.admit(accepted(ANN, 1, created_at=now, versions=(1, 1)), own=False)
    stale = buffer.release_stale(Freshness(now=now, max_age_s=50, policy_version=10, max_version_lag=5))
    assert [candidate.arrival for candidate in stale] == [1, 2], "a peer's version says nothing about ours"
    assert reader.figures().released == {"stale": 2}
    assert reader.own_held() == 1


def test_followers_groups_grow_stale_by_our_versions(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    now = time.time()
    for number, (followed, version) in enumerate(((ME, 1), (ME, 9), (ANN, 1)), start=1):
        group = accepted(ANN, number, created_at=now, versions=(version, version), weights_of=followed.peer_id)
        buffer.admit(group, own=False)
    stale = buffer.release_stale(
        Freshness(now=now, max_age_s=50, policy_version=10, max_version_lag=5, peer_id=ME.peer_id)
    )
    assert [candidate.arrival for candidate in stale] == [1]


def test_own_groups_that_a_peer_has_are_delivered(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=3, ann=1)
    ids = {candidate.id for candidate in buffer._candidates() if candidate.own is False or candidate.arrival == 2}
    assert [candidate.arrival for candidate in buffer.release_delivered(ids)] == [2]
    assert reader.own_held() == 2
    assert reader.figures().released == {"delivered": 1}


def test_a_commit_waits_for_the_disk(buffer: ReplayBuffer) -> None:
    full = 2  # by SQLite's documentation
    assert buffer._db.execute("PRAGMA synchronous").fetchone()[0] == full
    assert buffer._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_the_oldest_foreign_groups_make_room(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=2, ann=4)
    oldest = min(c.arrival for c in buffer._candidates() if not c.own)
    assert [c.arrival for c in buffer.evict_foreign(keep=3)] == [oldest]
    assert reader.ready_counts() == (2, 3)
    assert reader.figures().released == {"evicted": 1}


def test_pruning_forgets_used_groups_only_and_keeps_the_totals(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=6, ann=2)
    buffer.take(1, own=3, foreign=1)
    buffer.release_step(1, ReleaseReason.TRAINED)
    before = reader.figures()
    assert buffer.prune(max_disk_bytes=1 << 30) == 0
    assert buffer.prune(max_disk_bytes=1) == 4
    after = reader.figures()
    assert (after.groups_own, after.trained_own, after.trained_foreign) == (6, 3, 1)
    assert (after.tokens_own, after.tokens_foreign) == (before.tokens_own, before.tokens_foreign)
    assert reader.ready_counts() == (3, 1)
    assert buffer.last_number() == 6


def test_pruning_stops_where_it_fits(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=6)
    size = len(reader.envelopes([bytes.fromhex(reader.list_groups(limit=1)[0].id)])[0])
    buffer.take(1, own=4, foreign=0)
    buffer.release_step(1, ReleaseReason.TRAINED)
    assert buffer.prune(max_disk_bytes=int(size * 4.5)) == 2


def test_reading_a_group_by_its_beginning(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=1)
    (summary,) = reader.list_groups(limit=5)
    found = reader.find(summary.id[:8])
    assert found is not None
    assert found[0] == summary
    assert reader.find("zz") is None
    assert reader.find("%%%%") is None
    assert reader.envelopes([bytes.fromhex(summary.id), bytes(32)]) == [found[1]]


def test_another_file_is_named_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    path.write_bytes(b"this is no database, but someone may want it" * 100)
    before = path.read_bytes()
    with pytest.raises(DamagedError, match="the next start of the node replaces it"):
        ReplayBuffer(path)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(path: Path, buffer: ReplayBuffer) -> None:
    buffer.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="schema 99"):
        ReplayBuffer(path)


WRITER = """
import sys
from pathlib import Path
from tests.replay.test_buffer import ME, ReplayBuffer, accepted
buffer = ReplayBuffer(Path(sys.argv[1]))
for number in range(1, 100000):
    buffer.admit(accepted(ME, number), own=True)
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


def test_what_was_acknowledged_survives_a_kill(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = 0
    for line in process.stdout:
        acknowledged = int(line)
        if acknowledged == 20:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    buffer = ReplayBuffer(path)
    assert buffer.last_number() >= acknowledged
    assert len(buffer.take(1, own=1000, foreign=0).groups) == buffer.last_number()
    buffer.close()


def _candidate(sender: str, arrival: int, *, own: bool = False) -> Candidate:
    return Candidate(
        id=bytes([arrival]), sender=sender, own=own, arrival=arrival, created_at=float(arrival), policy_version=0
    )


def test_senders_take_turns_and_the_newest_goes_first() -> None:
    candidates = [_candidate("loud", n) for n in range(1, 7)] + [_candidate("quiet", 7), _candidate("me", 8, own=True)]
    chosen = choose_foreign(candidates, 4)
    assert [(c.sender, c.arrival) for c in chosen] == [("loud", 6), ("quiet", 7), ("loud", 5), ("loud", 4)]
    assert [c.arrival for c in choose_own(candidates, 4)] == [8]


@pytest.mark.parametrize("is_old", [False, True])
def test_pages_of_what_went_are_given_back_to_the_disk(path: Path, is_old: bool) -> None:
    if is_old:  # from before pages could be given back
        with closing(sqlite3.connect(path)) as old:
            old.executescript("CREATE TABLE filler (x); DROP TABLE filler;")
    buffer = ReplayBuffer(path)
    fill(buffer, own=150, ann=1)
    buffer.take(1, own=150, foreign=0)
    buffer.release_step(1, ReleaseReason.TRAINED)
    buffer.shrink()
    before = path.stat().st_size
    assert buffer.evict_released(1 << 30) == 150
    assert path.stat().st_size < before / 2
    assert path.with_name(f"{path.name}-wal").stat().st_size == 0
    assert len(buffer.take(2, own=9, foreign=9).groups) == 1
    buffer.close()


def test_foreign_groups_that_are_ready_are_bounded_by_their_bytes(buffer: ReplayBuffer, reader: ReplayReader) -> None:
    fill(buffer, own=2, ann=4)
    each, rest = divmod(reader.ready_foreign_bytes(), 4)
    evicted = buffer.evict_foreign(keep=100, keep_bytes=2 * each + rest)
    assert len(evicted) == 2
    assert reader.ready_counts() == (2, 2)
    assert reader.ready_foreign_bytes() <= 2 * each + rest
