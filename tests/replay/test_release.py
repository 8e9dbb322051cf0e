"""Releasing groups of the buffer by reason, pruning released ones, and totals that count every group once."""

import random
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest

from ftis_node.replay import database
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.group_choice import Freshness
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from tests.replay.test_buffer import ANN, BOB, ME, accepted, fill


def test_stale_groups_are_released_with_the_reason_stale(buffer, reader):
    now = time.time()
    buffer.admit(accepted(ME, 1, created_at=now - 100), own=True)
    buffer.admit(accepted(ME, 2, created_at=now, versions=(1, 1)), own=True)
    buffer.admit(accepted(ME, 3, created_at=now, versions=(9, 9)), own=True)
    buffer.admit(accepted(ANN, 1, created_at=now, versions=(1, 1)), own=False)
    stale = buffer.release_stale(Freshness(now=now, max_age_s=50, policy_version=10, max_version_lag=5))
    assert [candidate.arrival for candidate in stale] == [1, 2], "versions of different learners cannot be compared"
    assert (reader.figures().released, reader.own_held()) == ({"stale": 2}, 1)


def test_own_groups_from_before_the_clock_was_set_back_are_stale_without_a_learner(buffer):
    now = time.time()
    for number, ahead_s in enumerate((50, 70), start=1):
        buffer.admit(accepted(ME, number, created_at=now + ahead_s), own=True)
        buffer.admit(accepted(ANN, number, created_at=now + ahead_s), own=False)
    freshness = Freshness(now=now, max_age_s=50, policy_version=0, max_version_lag=5)
    assert buffer.release_stale(freshness) == [], "this node can still train on them"
    stale = buffer.release_stale(replace(freshness, max_ahead_s=60))
    assert [candidate.arrival for candidate in stale] == [3]


def test_a_followers_groups_become_stale_by_versions_of_this_node(buffer):
    now = time.time()
    for number, (followed, version) in enumerate(((ME, 1), (ME, 9), (ANN, 1)), start=1):
        group = accepted(ANN, number, created_at=now, versions=(version, version), weights_of=followed.peer_id)
        buffer.admit(group, own=False)
    stale = buffer.release_stale(
        Freshness(now=now, max_age_s=50, policy_version=10, max_version_lag=5, peer_id=ME.peer_id)
    )
    assert [candidate.arrival for candidate in stale] == [1]


def test_own_groups_that_a_peer_has_are_released_as_delivered(buffer, reader):
    fill(buffer, own=3, ann=1)
    ids = {candidate.id for candidate in buffer._candidates() if candidate.own is False or candidate.arrival == 2}
    assert [candidate.arrival for candidate in buffer.release_delivered(ids)] == [2]
    assert (reader.own_held(), reader.figures().released) == (2, {"delivered": 1})


def test_the_oldest_foreign_groups_are_evicted(buffer, reader):
    fill(buffer, own=2, ann=4)
    oldest = min(c.arrival for c in buffer._candidates() if not c.own)
    assert [c.arrival for c in buffer.evict_foreign(keep=3)] == [oldest]
    assert reader.ready_counts() == (2, 3)
    assert reader.figures().released == {"evicted": 1}


def test_pruning_deletes_used_groups_only_and_keeps_the_totals(buffer, reader):
    fill(buffer, own=6, ann=2)
    buffer.take(1, own=3, foreign=1)
    buffer.release_step(1, ReleaseReason.TRAINED)
    before = reader.figures()
    assert (buffer.prune(max_disk_bytes=1 << 30), buffer.prune(max_disk_bytes=1)) == (0, 4)
    after = reader.figures()
    assert (after.groups_own, after.trained_own, after.trained_foreign) == (6, 3, 1)
    assert (after.tokens_own, after.tokens_foreign) == (before.tokens_own, before.tokens_foreign)
    assert reader.ready_counts() == (3, 1)
    assert buffer.last_number() == 6


def test_pruning_stops_at_the_limit(buffer, reader):
    fill(buffer, own=6)
    size = len(reader.envelopes([bytes.fromhex(reader.list_groups(limit=1)[0].id)])[0])
    buffer.take(1, own=4, foreign=0)
    buffer.release_step(1, ReleaseReason.TRAINED)
    assert buffer.prune(max_disk_bytes=int(size * 4.5)) == 2
    assert buffer.prune(max_disk_bytes=1 << 30, max_groups=3) == 1


def test_freed_pages_are_returned_to_the_disk(path, buffer):
    fill(buffer, own=150, ann=1)
    buffer.take(1, own=150, foreign=0)
    buffer.release_step(1, ReleaseReason.TRAINED)
    buffer.shrink()
    before = path.stat().st_size
    assert buffer.evict_released(1 << 30) == 150
    assert path.stat().st_size < before / 2
    assert path.with_name(f"{path.name}-wal").stat().st_size == 0
    assert len(buffer.take(2, own=9, foreign=9).groups) == 1


@pytest.fixture
def db():
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(database.FORGOTTEN_SCHEMA)
        yield connection
    connection.close()


def test_the_least_recently_used_rows_are_dropped_first(db, monkeypatch):
    monkeypatch.setattr(database, "MAX_FORGOTTEN", 2)
    for touch, (sender, number) in enumerate((("ann", 1), ("bob", 1), ("eve", 1), ("ann", 2))):
        database.forget(db, sender, number, touch=touch)
    database.trim(db)
    database.forget(db, "eve", 1, touch=9)
    assert db.execute("SELECT sender, number FROM forgotten ORDER BY sender").fetchall() == [("ann", 2), ("eve", 1)]
    assert database.is_forgotten(db, "ann", 2) and not database.is_forgotten(db, "ann", 1)


def test_a_pruned_group_is_not_admitted_again(buffer, reader):
    first, second = accepted(ANN, 1), accepted(ANN, 2)
    arrivals = [(first, False), (first, False), (second, False), (accepted(ME, 1), True)]
    assert (buffer.admit_many(arrivals), buffer.last_number()) == ([True, False, True, True], 1)
    buffer.take(1, own=1, foreign=1)
    buffer.release_step(1, ReleaseReason.TRAINED)
    assert buffer.prune(max_disk_bytes=1) == 2
    assert not reader.is_known(second.envelope.id)
    assert reader.has_number(ANN.peer_id, 2)
    assert not reader.has_number(ANN.peer_id, 3)
    assert buffer.admit_many([(second, False), (accepted(ANN, 3), False)]) == [False, True]


def test_a_failed_batch_admits_no_group(buffer):
    invalid = accepted(ANN, 2)
    object.__setattr__(invalid.group, "model", None)
    with pytest.raises(sqlite3.IntegrityError):
        buffer.admit_many([(accepted(ANN, 1), False), (invalid, False)])
    assert buffer.take(1, own=0, foreign=9).groups == []


BY_ROWS = (
    "SELECT sum(state = 'ready'), sum(state = 'taken'), sum(length(envelope)), sum(num_tokens * (state != 'released'))"
    " FROM groups"
)
KEPT = "SELECT count(*), sum(num_bytes) FROM groups"


def _use(buffer: ReplayBuffer, *, rounds: int) -> None:
    """Apply every operation on groups, in an order from a fixed seed."""
    draw = random.Random(0)
    for step in range(1, rounds + 1):
        identities = [draw.choice((ME, ANN, BOB)) for _ in range(5)]
        arrivals = [(accepted(one, 10 * step + at), one is ME) for at, one in enumerate(identities)]
        buffer.admit_many([*arrivals, arrivals[0]])  # the last one repeats the first
        buffer.take(step, own=2, foreign=2)
        if step % 3:
            buffer.release_step(step, draw.choice((ReleaseReason.TRAINED, ReleaseReason.REFUSED)))
        else:
            buffer.reconcile(step - 1)
        if step % 4 == 0:
            buffer.evict_foreign(keep=2)
            buffer.release_stale(Freshness(now=1e12, max_age_s=1.0, policy_version=0, max_version_lag=8))
            buffer.prune(max_disk_bytes=2000)


def test_figures_count_every_group_once(tmp_path):
    path = tmp_path / "replay.sqlite"
    with closing(ReplayBuffer(path)) as buffer, closing(ReplayReader(path)) as reader:
        assert (reader.figures().groups_own, reader.kept(), reader.ready_foreign_bytes()) == (0, (0, 0), 0)
        _use(buffer, rounds=6)
        figures = reader.figures()
        admitted = (figures.groups_own, figures.groups_foreign, figures.tokens_own, figures.tokens_foreign)
        trained = reader.trained_tokens(), figures.trained_own + figures.trained_foreign
        assert figures.trained_tokens == trained[0]
        buffer.prune(max_disk_bytes=0)
        figures = reader.figures()
        assert (figures.groups_own, figures.groups_foreign, figures.tokens_own, figures.tokens_foreign) == admitted
        assert (reader.trained_tokens(), figures.trained_own + figures.trained_foreign) == trained
        assert (figures.trained_tokens, admitted[0] + admitted[1]) == (trained[0], 30)
        with closing(sqlite3.connect(path)) as db:
            counted, kept = db.execute(BY_ROWS).fetchone(), db.execute(KEPT).fetchone()
            assert reader.kept() == kept
            with db:
                db.execute("DELETE FROM groups WHERE arrival = (SELECT max(arrival) FROM groups)")
            ReplayBuffer(path).close()
            assert reader.kept() == db.execute(KEPT).fetchone() < kept
        assert (figures.ready, figures.taken, figures.envelope_bytes, figures.tokens) == counted
        assert all((*trained, counted[0], counted[2]))
