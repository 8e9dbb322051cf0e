"""An acknowledgment by a new peer counts only for a group that it fetched."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from ftis_node.records.envelope import open_announcement

if TYPE_CHECKING:
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_CONFIRMED = 6


async def announced_ids(attacker: Member, count: int) -> list[bytes]:
    """Return the ids of groups that the victim announces."""
    ids: list[bytes] = []
    async with asyncio.timeout(60), aclosing(attacker.gossip.announcements()) as announcements:
        async for one in announcements:
            if one.sender == attacker.victim_id:
                ids.append(open_announcement(one.payload).id)
            if len(ids) == count:
                break
    return ids


async def test_an_acknowledgment_without_a_fetch_does_not_count(
    victim: Victim, attacker: Member, honest: Member
) -> None:
    ids = await announced_ids(attacker, NUM_CONFIRMED)
    assert await attacker.gossip.confirm(attacker.victim_id, ids)
    confirmed = [event for event in victim.node.events("confirmed") if event["peer"] == attacker.peer_id]
    assert confirmed == []
    fetched = await attacker.gossip.fetch(attacker.victim_id, ids[:1])
    assert len(fetched.bodies) == 1
    before = (await victim.status())["swarm"]["groups_confirmed"]
    assert await attacker.gossip.confirm(attacker.victim_id, ids)

    async def one_is_confirmed() -> bool:
        return bool((await victim.status())["swarm"]["groups_confirmed"] > before)

    await victim.until(one_is_confirmed)
    confirmed = [event["group"] for event in victim.node.events("confirmed") if event["peer"] == attacker.peer_id]
    assert confirmed == [ids[0].hex()], "only the fetched group counts"
