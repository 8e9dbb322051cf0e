"""The counts that SQLite keeps are those one gets by counting, whatever happened to the groups."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.lifecycle import Freshness, ReleaseReason
from ftis_node.replay.reader import ReplayReader
from ftis_node.replay.side_tables import BY_ROWS, TRIGGERS
from tests.replay.test_buffer import ANN, BOB, ME, accepted

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

DROP = "DROP TABLE counts;" + "".join(f"DROP TRIGGER {name};" for name in TRIGGERS)


def _live(buffer: ReplayBuffer, *, rounds: int) -> None:
    """Everything that may happen to groups, in some order."""
    draw = random.Random(0)
    for step in range(1, rounds + 1):
        identities = [draw.choice((ME, ANN, BOB)) for _ in range(5)]
        arrivals = [(accepted(one, 10 * step + at), one is ME) for at, one in enumerate(identities)]
        buffer.admit_many([*arrivals, arrivals[0]])  # the last one is known
        buffer.take(step, own=2, foreign=2)
        if step % 3:
            buffer.release_step(step, draw.choice((ReleaseReason.TRAINED, ReleaseReason.REFUSED)))
        else:
            buffer.reconcile(step - 1)
        if step % 4 == 0:
            buffer.evict_foreign(keep=2)
            buffer.release_stale(Freshness(now=1e12, max_age_s=1.0, policy_version=0, max_version_lag=8))
            buffer.prune(max_disk_bytes=2000)


def _check(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        kept = "SELECT own, state, reason, num_groups, num_tokens, num_bytes FROM counts WHERE num_groups > 0"
        assert db.execute(f"{kept} ORDER BY 1, 2, 3").fetchall() == db.execute(f"{BY_ROWS} ORDER BY 1, 2, 3").fetchall()


def test_counts_follow_every_change(tmp_path: Path) -> None:
    with closing(ReplayBuffer(tmp_path / "replay.sqlite")) as buffer:
        _live(buffer, rounds=10)
    _check(tmp_path / "replay.sqlite")


def test_a_buffer_that_did_not_count_is_read_and_then_counted(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with closing(ReplayBuffer(path)) as buffer:
        _live(buffer, rounds=4)
    with closing(ReplayReader(path)) as reader:
        counted = reader.figures()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(DROP)
    with closing(ReplayReader(path)) as reader:
        assert reader.figures() == counted
    ReplayBuffer(path).close()
    _check(path)


def test_own_rewards_are_of_the_newest_own_groups_in_whatever_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "replay.sqlite"
    buffer = ReplayBuffer(path)
    for version in range(1, 6):
        for one in (ME, ANN):
            assert buffer.admit(accepted(one, version, versions=(version, version)), own=one is ME)
        buffer.take(version, own=int(version < 4), foreign=0)  # 4 and 5 stay READY
        if version < 3:
            buffer.release_step(version, ReleaseReason.TRAINED)
    reader = ReplayReader(path)
    assert reader.own_rewards() == [("arithmetic", version, [1.0, 0.0]) for version in (5, 4, 3, 2, 1)]
    monkeypatch.setattr("ftis_node.replay.reader.MOST_OWN_REWARDS", 3)
    assert [version for _, version, _ in reader.own_rewards()] == [5, 4, 3]
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE groups SET rewards = '[1.0, 0.0' WHERE own = 1 AND number = 4")
        db.execute("UPDATE groups SET state = 'released', reason = 'damaged' WHERE own = 1 AND number = 5")
    assert [version for _, version, _ in reader.own_rewards()] == [3, 2, 1]
    reader.close()
    buffer.close()
