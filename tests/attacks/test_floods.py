"""Floods: malformed announcements, and announcements of nonexistent groups."""

import os
from functools import partial

import pytest

from tests.attacks.messages import ANNOUNCEMENTS

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

NUM_ANNOUNCEMENTS = 4_000  # a minute's limit is 600
NUM_AT_ONCE = 16


async def test_malformed_announcements_are_counted_and_ban(victim, scene, honest):
    async def announce(payload, reason):
        async with scene.member() as attacker:

            async def is_banned():
                await attacker.gossip.announce(payload + os.urandom(4))
                return await victim.is_banned(attacker.peer_id)

            await victim.until(is_banned)
            assert await victim.num_refused_of(attacker.peer_id, reason) >= 5

    await scene.at_once({name: partial(announce, *expected) for name, expected in ANNOUNCEMENTS.items()})


async def test_thousands_of_announcements_of_nonexistent_groups_ban(victim, attacker, honest):
    accepted, events = await victim.num_accepted(honest.peer_id), victim.file_bytes("events.jsonl*")
    first = os.urandom(32)
    await attacker.announce_until_requested({first: attacker.claim(first, b"", envelope_bytes=100)})
    await attacker.announce_nonexistent(NUM_ANNOUNCEMENTS, num_at_once=NUM_AT_ONCE)
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "announcement_flood"))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    await victim.until_above(accepted, lambda: victim.num_accepted(honest.peer_id))
    grown = victim.file_bytes("events.jsonl*") - events
    assert grown < 100 * NUM_ANNOUNCEMENTS, "the event log has no line for each announcement"
