"""Invalid records in the directory: too large, valid for too long, under another peer's key, or malformed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from ftis_node.config.home import Home
from ftis_node.gossip.directory.entries import EntryKind, sign_entry
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, PeerID
from ftis_node.gossip.wire_format import record_key
from ftis_node.records.identity import Identity

if TYPE_CHECKING:
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_QUERIES = 4
YEARS_S = 30 * 365 * 86400.0


@pytest.mark.parametrize("fault", ["3 MiB", "for thirty years", "under another's key"])
async def test_an_invalid_record_is_not_stored(victim: Victim, attacker: Member, honest: Member, fault: str) -> None:
    run_id, node = attacker.maker.manifest.run_id, attacker.link.directory._node
    soon, late = time.time() + 300, time.time() + YEARS_S
    owner = honest if fault == "under another's key" else attacker
    value, expires_at = {
        "3 MiB": (bytes(3 << 20), soon),
        "for thirty years": (sign_entry(attacker.identity, EntryKind.RECORD, run_id, b"x", expires_at=late), late),
        "under another's key": (sign_entry(attacker.identity, EntryKind.RECORD, run_id, b"x", expires_at=soon), soon),
    }[fault]
    before = (await victim.status())["swarm"]["records_refused"]

    async def is_refused() -> bool:
        await node.store(record_key(run_id, owner.peer_id), value, expires_at)
        return bool((await victim.status())["swarm"]["records_refused"] > before)

    await victim.until(is_refused)


async def test_a_malformed_record_of_the_sender_is_counted(victim: Victim, attacker: Member) -> None:
    async def is_counted() -> int:
        await attacker.gossip.publish_record(b"\xffrandom", ttl_s=60)
        return await victim.num_refused_of(attacker.peer_id, "record_parse")

    await victim.until(is_counted)


async def test_a_node_that_is_listed_as_its_own_neighbor_continues(victim: Victim, attacker: Member) -> None:
    """hivemind asserts that this does not happen; its assertion must not end the node."""
    table, num_queries = attacker.link.directory._node.protocol.routing_table, 0
    victims_dht_id = DHTID.generate(source=Identity.load(Home(victim.node.home).identity).peer)

    def return_the_victim(*_: Any, exclude: Any = None, **__: Any) -> list[Any]:
        nonlocal num_queries
        num_queries += exclude == victims_dht_id  # a query of the victim
        return [(victims_dht_id, PeerID.from_base58(attacker.victim_id))]

    with patch.object(table, "get_nearest_neighbors", return_the_victim):

        async def has_queried() -> bool:
            return num_queries >= NUM_QUERIES

        await victim.until(has_queried)
    step = (await victim.status())["learner"]["step"]

    async def trains() -> bool:
        return bool((await victim.status())["learner"]["step"] > step)

    await victim.until(trains)
