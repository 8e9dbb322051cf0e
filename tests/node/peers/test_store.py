"""A peers file is opened with all its data, and one of another version is refused."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ftis_node.errors import ConfigError
from ftis_node.node.peers.store import SCHEMA, SCHEMA_VERSION, PeerStore
from ftis_node.swarm.reputation import ReputationTable

NOW = 1e9


@pytest.fixture
def path(tmp_path):
    """Write a file with a banned peer."""
    reasons = json.dumps({"false_claim": 1, "reward_mismatch": 3, "quota": 2})
    with closing(sqlite3.connect(path := tmp_path / "peers.sqlite")) as db:
        db.executescript(f"{SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        banned = (NOW, NOW + 60, reasons, NOW)
        db.execute("INSERT INTO peers VALUES ('ann', -5, ?, ?, 'reward_mismatch', 2, 0, ?, ?)", banned)
        db.execute("INSERT INTO peers VALUES ('bob', 3, ?, 0, '', 0, 1, 'not JSON', ?)", (NOW, NOW))
        db.commit()
    return path


def loaded(path: Path) -> ReputationTable:
    store, table = PeerStore(path), ReputationTable()
    store.load(table, now=NOW)
    store.close()
    return table


def test_a_row_with_a_damaged_text_is_loaded(path):
    table = loaded(path)
    ann, bob = table.record_of("ann"), table.record_of("bob")
    assert ann.reasons == {"false_claim": 1, "reward_mismatch": 3, "quota": 2}
    assert (ann.reputation.ban_reason, ann.reputation.num_bans) == ("reward_mismatch", 2)
    assert (ann.reputation.score, ann.reputation.banned_until) == (-5, NOW + 60)
    assert bob.reputation.trusted and not bob.reasons


def test_another_schema_is_refused(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigError, match=f"schema {SCHEMA_VERSION + 1}"):
        PeerStore(path)
