"""The sequence numbers of pruned groups stay used, and their table is bounded."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.replay import side_tables
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from tests.replay.test_buffer import ANN, ME, accepted

numbers = st.lists(st.integers(1, 30), unique=True, max_size=30)


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(side_tables.FORGOTTEN_SCHEMA)
        yield connection
    connection.close()


def _intervals(db: sqlite3.Connection, sender: str = "ann") -> list[tuple[int, int]]:
    return db.execute("SELECT first, last FROM forgotten WHERE sender = ? ORDER BY first", (sender,)).fetchall()


@settings(max_examples=100, deadline=None)
@given(numbers)
def test_exactly_the_forgotten_numbers_count_as_used(order: list[int]) -> None:
    with sqlite3.connect(":memory:") as db:
        db.executescript(side_tables.FORGOTTEN_SCHEMA)
        for touch, number in enumerate(order):
            side_tables.forget(db, "ann", number, touch=touch)
        assert {n for n in range(33) if side_tables.is_forgotten(db, "ann", n)} == set(order)
        assert not side_tables.is_forgotten(db, "bob", order[0] if order else 1)
        for touch, number in enumerate(order):
            side_tables.forget(db, "ann", number, touch=touch)
    db.close()


def test_intervals_of_a_former_version_stay_used(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO forgotten VALUES ('ann', 1, 9, 0)")
    side_tables.forget(db, "ann", 5, touch=1)
    side_tables.forget(db, "ann", 11, touch=2)
    assert [n for n in range(13) if side_tables.is_forgotten(db, "ann", n)] == [*range(1, 10), 11]


def test_the_least_recently_used_rows_are_dropped_first(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_tables, "MAX_FORGOTTEN", 2)
    for touch, (sender, number) in enumerate((("ann", 1), ("bob", 1), ("eve", 1), ("ann", 2))):
        side_tables.forget(db, sender, number, touch=touch)
    side_tables.trim(db)
    assert [_intervals(db, name) for name in ("ann", "bob", "eve")] == [[(2, 2)], [], [(1, 1)]]


def test_a_pruned_group_is_not_admitted_again(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    buffer = ReplayBuffer(path)
    reader = ReplayReader(path)
    first, second = accepted(ANN, 1), accepted(ANN, 2)
    assert buffer.admit_many([(first, False), (first, False), (second, False), (accepted(ME, 1), True)]) == [
        True,
        False,
        True,
        True,
    ]
    assert buffer.last_number() == 1
    buffer.take(1, own=1, foreign=1)
    buffer.release_step(1, ReleaseReason.TRAINED)
    assert buffer.prune(max_disk_bytes=1) == 2
    assert not reader.is_known(second.envelope.id)
    assert reader.has_number(ANN.peer_id, 2)
    assert not reader.has_number(ANN.peer_id, 3)
    assert buffer.admit_many([(second, False), (accepted(ANN, 3), False)]) == [False, True]
    reader.close()
    buffer.close()


def test_a_failed_batch_admits_no_group(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    invalid = accepted(ANN, 2)
    object.__setattr__(invalid.group, "model", None)
    with pytest.raises(sqlite3.IntegrityError):
        buffer.admit_many([(accepted(ANN, 1), False), (invalid, False)])
    assert buffer.take(1, own=0, foreign=9).groups == []
    buffer.close()
