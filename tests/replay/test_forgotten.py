"""The sequence numbers of pruned groups stay used, and their table is bounded."""

import sqlite3

import pytest

from ftis_node.replay import side_tables
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from tests.replay.test_buffer import ANN, ME, accepted


@pytest.fixture
def db():
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(side_tables.FORGOTTEN_SCHEMA)
        yield connection
    connection.close()


def test_the_least_recently_used_rows_are_dropped_first(db, monkeypatch):
    monkeypatch.setattr(side_tables, "MAX_FORGOTTEN", 2)
    for touch, (sender, number) in enumerate((("ann", 1), ("bob", 1), ("eve", 1), ("ann", 2))):
        side_tables.forget(db, sender, number, touch=touch)
    side_tables.trim(db)
    side_tables.forget(db, "eve", 1, touch=9)
    assert db.execute("SELECT sender, number FROM forgotten ORDER BY sender").fetchall() == [("ann", 2), ("eve", 1)]
    assert side_tables.is_forgotten(db, "ann", 2) and not side_tables.is_forgotten(db, "ann", 1)


def test_a_pruned_group_is_not_admitted_again(tmp_path):
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


def test_a_failed_batch_admits_no_group(tmp_path):
    buffer = ReplayBuffer(tmp_path / "replay.sqlite")
    invalid = accepted(ANN, 2)
    object.__setattr__(invalid.group, "model", None)
    with pytest.raises(sqlite3.IntegrityError):
        buffer.admit_many([(accepted(ANN, 1), False), (invalid, False)])
    assert buffer.take(1, own=0, foreign=9).groups == []
    buffer.close()
