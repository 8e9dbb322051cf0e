"""A file of peers of schema 1 is opened with all that it holds, under the present names."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ftis_node.errors import ConfigError
from ftis_node.node.peers.store import SCHEMA, PeerStore
from ftis_node.swarm.reputation.reputation_table import ReputationTable

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1e9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of schema 1 with a banned peer."""
    reasons = json.dumps({"lied": 1, "reward": 3, "quota": 2})
    with closing(sqlite3.connect(path := tmp_path / "peers.sqlite")) as db:
        db.executescript(f"{SCHEMA} PRAGMA user_version = 1;")
        db.execute("INSERT INTO peers VALUES ('ann', -5, ?, ?, 'reward', 2, 0, ?, ?)", (NOW, NOW + 60, reasons, NOW))
        db.execute("INSERT INTO peers VALUES ('bob', 3, ?, 0, '', 0, 1, 'no JSON', ?)", (NOW, NOW))
        db.commit()
    return path


def loaded(path: Path) -> ReputationTable:
    store, table = PeerStore(path), ReputationTable()
    store.load(table, now=NOW)
    store.close()
    return table


def test_reasons_of_schema_1_get_their_present_names(path: Path) -> None:
    for _ in range(2):  # upgraded once, then opened as it is
        table = loaded(path)
        ann, bob = table.record_of("ann"), table.record_of("bob")
        assert ann.reasons == {"false_claim": 1, "reward_mismatch": 3, "quota": 2}
        assert (ann.reputation.ban_reason, ann.reputation.num_bans) == ("reward_mismatch", 2)
        assert (ann.reputation.score, ann.reputation.banned_until) == (-5, NOW + 60)
        assert bob.reputation.trusted and not bob.reasons
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (2,)


def test_a_newer_schema_is_rejected(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 3")
    with pytest.raises(ConfigError, match="schema 3"):
        PeerStore(path)
