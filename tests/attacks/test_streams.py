"""Streams that the victim serves: malformed frames, lengths of 4 GiB, slow requests, and floods of requests.

Also confirmations: one of a new peer counts only for a group that it fetched.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import pytest

from ftis_node.gossip.wire_format import HEADER, Frame, RpcService
from ftis_node.records.envelope import open_announcement
from tests.attacks.victim import REQUESTS_PER_MINUTE

if TYPE_CHECKING:
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_CONFIRMED = 6
FOUR_GIB = 2**32 - 1
VARINT_4_GIB = b"\x0a\xff\xff\xff\xff\x0f"  # field 1, a length of 4 GiB
MALFORMED = {
    "frame_kind": b"\xff" + os.urandom(4096),
    "frame_size": HEADER.pack(Frame.REQUEST, FOUR_GIB),
    "ids": HEADER.pack(Frame.REQUEST, 5) + b"short",
}


async def test_malformed_frames_are_counted(victim: Victim, attacker: Member) -> None:
    before = {reason: await victim.num_errors("serve_errors", reason) for reason in MALFORMED}
    for sent in MALFORMED.values():
        async with attacker.stream(RpcService.FETCH) as (reader, writer):
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), 10) == b""

    async def are_counted() -> bool:
        return all([await victim.num_errors("serve_errors", reason) > before[reason] for reason in MALFORMED])

    await victim.until(are_counted)


@pytest.mark.parametrize("question", [b"\xff\xffrandom", VARINT_4_GIB], ids=["random bytes", "a varint of 4 GiB"])
async def test_a_malformed_question_is_counted_and_has_no_answer(
    victim: Victim, attacker: Member, question: bytes
) -> None:
    answered = await attacker.gossip.request_backfill(attacker.victim_id, question)
    assert answered.bodies == ()
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "question_parse"))


async def test_slow_requests_are_ended_while_others_are_served(
    victim: Victim, attacker: Member, honest: Member
) -> None:
    """The attacker sends one byte per second on as many streams as a peer may open."""
    before = await victim.num_errors("serve_errors", "timed_out")

    async def send_slowly() -> None:
        async with attacker.stream(RpcService.FETCH) as (reader, writer):
            over = asyncio.create_task(reader.read())
            for byte in HEADER.pack(Frame.REQUEST, 64) + bytes(64):
                writer.write(bytes([byte]))
                done, _ = await asyncio.wait({over}, timeout=1.0)
                if done:
                    return
        raise AssertionError("the victim waited for the whole request")

    slow = asyncio.gather(*(send_slowly() for _ in range(4)))
    fetched = await honest.gossip.fetch(honest.victim_id, [bytes(32)])
    assert fetched.outcome == "complete"
    await slow

    async def is_counted() -> bool:
        return await victim.num_errors("serve_errors", "timed_out") > before

    await victim.until(is_counted)


async def test_streams_above_the_limit_of_a_peer_are_refused(victim: Victim, attacker: Member, honest: Member) -> None:
    async def hold() -> None:
        with suppress(OSError):  # the victim closed it
            async with attacker.stream(RpcService.FETCH) as (reader, writer):
                writer.write(HEADER.pack(Frame.REQUEST, 32))
                await reader.read()

    held = asyncio.gather(*(hold() for _ in range(40)))
    await asyncio.sleep(0.5)
    assert (await honest.gossip.fetch(honest.victim_id, [bytes(32)])).outcome == "complete"
    await held
    await victim.until(lambda: victim.num_errors("serve_errors", "flood"))
    await victim.until(lambda: victim.num_errors("serve_errors", "busy"))


@pytest.mark.parametrize("service", [RpcService.ASK, RpcService.FETCH])
async def test_requests_above_the_budget_are_answered_with_busy(
    victim: Victim, attacker: Member, honest: Member, service: RpcService
) -> None:
    before = await victim.num_errors("serve_errors", "over_requests")
    outcomes = set()
    for _ in range(REQUESTS_PER_MINUTE + 60 if service is RpcService.FETCH else REQUESTS_PER_MINUTE // 10 + 20):
        call = attacker.gossip.request_backfill if service is RpcService.ASK else attacker.gossip.fetch
        answered = await call(attacker.victim_id, b"" if service is RpcService.ASK else [bytes(32)])
        outcomes.add(str(answered.outcome))
    assert {"complete", "busy"} <= outcomes

    async def is_counted() -> bool:
        return await victim.num_errors("serve_errors", "over_requests") > before

    await victim.until(is_counted)
    assert (await honest.gossip.fetch(honest.victim_id, [bytes(32)])).outcome == "complete", (
        "each peer has a separate budget"
    )


async def test_a_banned_peer_is_not_served(victim: Victim, attacker: Member) -> None:
    bodies = {os.urandom(32): bytes([9]) * 100 for _ in range(12)}
    await attacker.announce_until_requested({one: attacker.claim(one, data) for one, data in bodies.items()})
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    before = await victim.num_errors("serve_errors", "refused")
    assert (await attacker.gossip.fetch(attacker.victim_id, [bytes(32)])).outcome == "broken"

    async def is_counted() -> bool:
        return await victim.num_errors("serve_errors", "refused") > before

    await victim.until(is_counted)


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
