"""Streams that the victim serves or opens: lengths of 4 GiB, endless and slow ones, more than a peer may open."""

import asyncio
import os
import time
from functools import partial

import pytest

from ftis_node.gossip.frames import HEADER, Frame
from ftis_node.gossip.names import RpcService
from tests.attacks.false_groups import FALSE_GROUPS
from tests.attacks.member import Member, Scene
from tests.attacks.messages import SERVERS
from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

NUM_SLOW = 4
NUM_PARALLEL_REQUESTS = 3
BUSY_WITHIN_S = 120.0


async def an_invalid_stream_ends_while_others_are_pulled(scene: Scene) -> None:
    victim, honest = scene.victim, scene.victim.honest

    async def serve(name: str) -> None:
        script, outcome = SERVERS[name]
        before = await victim.num_errors("fetch_errors", outcome)
        async with scene.member(script=script) as attacker:

            async def has_failed() -> bool:
                for one in (os.urandom(32) for _ in range(8)):  # more than the node has slots for pulls
                    await attacker.gossip.announce(attacker.claim(one, b"", envelope_bytes=200))
                row = await victim.row(attacker.peer_id)
                return bool(row.get("failed_pulls") and f"pull_{outcome}" in row["reasons"])

            await victim.until(has_failed)
        await victim.until_above(before, lambda: victim.num_errors("fetch_errors", outcome))  # a second later

    accepted, began_at = await victim.num_accepted(honest.peer_id), time.monotonic()
    sent = honest.number
    await scene.at_once({name: partial(serve, name) for name in SERVERS})
    took_s, gained = time.monotonic() - began_at, await victim.num_accepted(honest.peer_id) - accepted
    assert gained >= (honest.number - sent) / 2 - 2, f"{gained} groups of the honest peer in {took_s:.0f} s"


async def slow_requests_are_ended_while_others_are_served(victim: Victim, attacker: Member) -> None:
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

    slow = asyncio.gather(*(send_slowly() for _ in range(NUM_SLOW)))
    await assert_served(victim.honest)
    await slow
    await victim.until_above(before, lambda: victim.num_errors("serve_errors", "timed_out"))


async def assert_served(honest: Member) -> None:
    fetched = await honest.gossip.fetch(honest.victim_id, [bytes(32)])
    assert fetched.outcome == "complete", "each peer has a separate budget"


async def requests_above_the_budget_are_answered_with_busy(victim: Victim, attacker: Member) -> None:
    """It requests in parallel until the node is busy, because the budget refills while a slow machine requests."""
    gossip, requests = attacker.gossip, {}
    requests["questions"] = partial(gossip.request_backfill, attacker.victim_id, b"")
    requests["groups"] = partial(gossip.fetch, attacker.victim_id, [bytes(32)])
    for request in requests.values():
        before, outcomes = await victim.num_errors("serve_errors", "over_requests"), set[str]()

        async def repeat(request=request, outcomes=outcomes) -> None:
            while "busy" not in outcomes:
                outcomes.add(str((await request()).outcome))

        async with asyncio.timeout(BUSY_WITHIN_S):
            await asyncio.gather(*(repeat() for _ in range(NUM_PARALLEL_REQUESTS)))
        assert outcomes == {"complete", "busy"}
        await victim.until_above(before, lambda: victim.num_errors("serve_errors", "over_requests"))
    await assert_served(victim.honest)


async def a_banned_peer_is_not_served(victim: Victim, attacker: Member) -> None:
    await attacker.announce_until_requested(FALSE_GROUPS["random bytes for a body"].make(attacker))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    before = await victim.num_errors("serve_errors", "refused")
    assert (await attacker.gossip.fetch(attacker.victim_id, [bytes(32)])).outcome == "broken"
    await victim.until_above(before, lambda: victim.num_errors("serve_errors", "refused"))


async def test_the_victim_serves_and_pulls_while_streams_are_misused(scene, honest):
    attacks = (
        slow_requests_are_ended_while_others_are_served,
        requests_above_the_budget_are_answered_with_busy,
        a_banned_peer_is_not_served,
    )
    invalid = {"invalid streams": partial(an_invalid_stream_ends_while_others_are_pulled, scene)}
    await scene.at_once(invalid | scene.by_members(*attacks))
