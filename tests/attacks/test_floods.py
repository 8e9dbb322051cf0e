"""Floods: malformed announcements, announcements of nonexistent groups, and a thousand identities of one peer."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from ftis_node.records.identity import Identity
from tests.attacks.member import joined
from tests.attacks.victim import MAX_READY_GROUPS

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stubs.group_maker import GroupMaker
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_ANNOUNCEMENTS = 20_000
NUM_AT_ONCE = 16
NUM_IDENTITIES = 1000


@pytest.mark.parametrize(
    ("payload", "reason"),
    [(b"\xffrandom", "announcement_parse"), (b"\x12\xff\xff\xff\xff\x0f", "announcement_parse"),
     (bytes(600), "announcement_size")],
    ids=["random bytes", "a varint of 4 GiB", "too long"],
)  # fmt: skip
async def test_malformed_announcements_are_counted_and_ban(
    victim: Victim, attacker: Member, payload: bytes, reason: str
) -> None:
    async def is_banned() -> bool:
        await attacker.gossip.announce(payload + os.urandom(4))
        return await victim.is_banned(attacker.peer_id)

    await victim.until(is_banned)
    assert await victim.num_refused_of(attacker.peer_id, reason) >= 5


async def test_twenty_thousand_announcements_of_nonexistent_groups_ban(
    victim: Victim, attacker: Member, honest: Member
) -> None:
    accepted = (await victim.row(honest.peer_id))["groups_accepted"]
    events = victim.file_bytes("events.jsonl*")
    first = os.urandom(32)
    await attacker.announce_until_requested({first: attacker.claim(first, b"", envelope_bytes=100)})

    await attacker.announce_nonexistent(NUM_ANNOUNCEMENTS, num_at_once=NUM_AT_ONCE)
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "announcement_flood"))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))

    async def continues() -> bool:
        return bool((await victim.row(honest.peer_id))["groups_accepted"] > accepted)

    await victim.until(continues)
    assert victim.file_bytes("events.jsonl*") - events < 1 << 20, "the event log has no line for each announcement"


async def test_a_thousand_identities_of_one_peer_share_one_quota(
    victim: Victim, maker: GroupMaker, sockets: Path, honest: Member
) -> None:
    """One peer announces and serves valid groups of a thousand senders."""
    invented = [Identity.generate() for _ in range(NUM_IDENTITIES)]

    def prepare(member: Member) -> None:
        member.answer_with_groups_of(invented)

    def held() -> Counter[str]:
        with sqlite3.connect(f"file:{victim.node.home}/replay.sqlite?mode=ro", uri=True) as database:
            rows = database.execute("SELECT sender FROM groups WHERE state = 'ready' AND own = 0").fetchall()
        return Counter(sender for (sender,) in rows)

    accepted = (await victim.row(honest.peer_id))["groups_accepted"]
    invented_ids = {one.peer_id for one in invented}
    async with joined(sockets / "thousand", maker, victim, prepare=prepare) as attacker:
        await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "quota"), within_s=60)
        await asyncio.sleep(3)  # the buffer is pruned each second
        num_held = sum(count for sender, count in held().items() if sender in invented_ids)
        assert num_held <= MAX_READY_GROUPS // 2, "one of two senders has half of the places"

        async def continues() -> bool:
            return bool((await victim.row(honest.peer_id))["groups_accepted"] > accepted + 4)

        await victim.until(continues)
    assert not await victim.is_banned(honest.peer_id)
