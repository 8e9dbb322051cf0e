"""Invalid entries and records in the directory: size, expiry, key, numbers at the limits of their types, addresses."""

import asyncio
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from ftis_node.config.home import Home
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, PeerID
from ftis_node.records.identity import Identity
from tests.attacks.member import Scene
from tests.attacks.messages import RECORDS, answer_with_the_largest_time, invalid_entries, record
from tests.attacks.victim import wait_until_continued

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

NUM_QUERIES = 4


async def an_invalid_record_is_not_stored(scene: Scene) -> None:
    victim, honest = scene.victim, scene.honest
    async with scene.member() as attacker:

        async def num_refused() -> int:
            return int((await victim.status())["swarm"]["records_refused"])

        for key, value, expires_at in invalid_entries(attacker, honest.peer_id).values():
            before = await num_refused()

            async def store_again(key: Any = key, value: bytes = value, expires_at: float = expires_at) -> int:
                await attacker.link.directory._node.store(key, value, expires_at)
                return await num_refused()

            await victim.until_above(before, store_again)


async def malformed_records_and_records_out_of_bounds_are_counted(scene: Scene) -> None:
    victim = scene.victim

    async def publish(reason: str, changes: dict[str, Any] | None) -> None:
        async with scene.member() as attacker:
            data = b"\xffrandom" if changes is None else record(attacker, **changes)

            async def is_refused() -> bool:
                await attacker.gossip.publish_record(data, ttl_s=60)
                return bool(await victim.num_refused_of(attacker.peer_id, reason))

            await victim.until(is_refused)

    attacks = {name: partial(publish, "record_malformed", changes) for name, changes in RECORDS.items()}
    await scene.at_once({**attacks, "random bytes": partial(publish, "record_parse", None)})


async def answers_with_the_largest_time_are_refused(scene: Scene) -> None:
    victim, honest = scene.victim, scene.honest
    async with scene.member(prepare=answer_with_the_largest_time) as attacker:
        await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "announcement_malformed"))
    await wait_until_continued(victim, honest)


async def a_node_that_is_listed_as_its_own_neighbor_continues(scene: Scene) -> None:
    """hivemind asserts that this does not happen; its assertion must not end the node."""
    victim, honest = scene.victim, scene.honest
    async with scene.member() as attacker:
        table, num_queries = attacker.link.directory._node.protocol.routing_table, 0
        victims_dht_id = DHTID.generate(source=Identity.load(Home(victim.node.home).identity).peer)

        def return_the_victim(*_: Any, exclude: Any = None, **__: Any) -> list[Any]:
            nonlocal num_queries
            num_queries += exclude == victims_dht_id  # a query of the victim
            return [(victims_dht_id, PeerID.from_base58(attacker.victim_id))]

        async def count() -> int:
            return num_queries

        with patch.object(table, "get_nearest_neighbors", return_the_victim):
            await victim.until_above(NUM_QUERIES - 1, count)
        await wait_until_continued(victim, honest)


async def test_invalid_entries_are_not_stored_and_addresses_that_cannot_be_dialed_are_skipped(
    victim, scene, dialed, honest
):
    """Each invented member has an address that one parser accepts and another refuses, and a valid one."""

    async def num_dials():
        return dialed.num_dials

    await asyncio.gather(
        scene.run(an_invalid_record_is_not_stored, a_node_that_is_listed_as_its_own_neighbor_continues),
        victim.until_above(0, num_dials, within_s=120),
    )
    await wait_until_continued(victim, honest)


async def test_malformed_records_and_answers_are_counted(scene, honest):
    await scene.run(malformed_records_and_records_out_of_bounds_are_counted, answers_with_the_largest_time_are_refused)
