"""A peers file of an older schema is opened with all its data, under the present names."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.limits import AccessSection
from ftis_node.errors import ConfigError
from ftis_node.node.peers.store import SCHEMA, SCHEMA_VERSION, PeerStore
from ftis_node.swarm.reputation import ReputationTable
from ftis_node.telemetry.events import REASONS

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1e9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a file of schema 1 with a banned peer."""
    reasons = json.dumps({"lied": 1, "reward": 3, "quota": 2})
    with closing(sqlite3.connect(path := tmp_path / "peers.sqlite")) as db:
        db.executescript(f"{SCHEMA} PRAGMA user_version = 1;")
        db.execute("INSERT INTO peers VALUES ('ann', -5, ?, ?, 'reward', 2, 0, ?, ?)", (NOW, NOW + 60, reasons, NOW))
        db.execute("INSERT INTO peers VALUES ('bob', 3, ?, 0, '', 0, 1, 'not JSON', ?)", (NOW, NOW))
        db.commit()
    return path


def loaded(path: Path) -> ReputationTable:
    store, table = PeerStore(path), ReputationTable(AccessSection())
    store.load(table, now=NOW)
    store.close()
    return table


def test_reasons_of_schema_1_get_their_present_names(path: Path) -> None:
    for _ in range(2):  # the first pass upgrades, the second opens the upgraded file
        table = loaded(path)
        ann, bob = table.record_of("ann"), table.record_of("bob")
        assert ann.reasons == {"false_claim": 1, "reward_mismatch": 3, "quota": 2}
        assert (ann.reputation.ban_reason, ann.reputation.num_bans) == ("reward_mismatch", 2)
        assert (ann.reputation.score, ann.reputation.banned_until) == (-5, NOW + 60)
        assert bob.reputation.trusted and not bob.reasons
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


@pytest.mark.parametrize("old", ["copy", "copy_ours", "weights_of", "scoring_time"])
def test_reasons_of_schema_2_get_their_present_names(path: Path, old: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE peers SET ban_reason = ?, reasons = ?", (old, json.dumps({old: 4, "quota": 1})))
        db.execute("PRAGMA user_version = 2")
        db.commit()
    for peer_id in ("ann", "bob"):
        record = loaded(path).record_of(peer_id)
        assert record.reasons == {REASONS[old]: 4, "quota": 1}
        assert record.reputation.ban_reason == REASONS[old]


def test_a_newer_schema_is_rejected(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigError, match=f"schema {SCHEMA_VERSION + 1}"):
        PeerStore(path)
