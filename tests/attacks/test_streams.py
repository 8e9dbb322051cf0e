"""Streams that the victim serves or opens: malformed frames, lengths of 4 GiB, slow requests, and floods of requests.

Also confirmations: one of a new peer counts only for a group that it fetched.
"""

import asyncio
import os
import time
from contextlib import aclosing, suppress
from functools import partial

import pytest

from ftis_node.gossip.wire_format import HEADER, Frame, RpcService
from ftis_node.records.envelope import open_announcement
from tests.attacks.false_groups import FALSE_GROUPS
from tests.attacks.member import GONE, Member, Scene
from tests.attacks.messages import FRAMES, QUESTIONS, SERVERS

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

NUM_CONFIRMED = 6
NUM_SLOW, NUM_OPEN = 4, 40
NUM_PARALLEL_REQUESTS = 3
BUSY_WITHIN_S = 120.0


async def malformed_frames_are_counted(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
        before = {reason: await victim.num_errors("serve_errors", reason) for reason in FRAMES}
        for sent in FRAMES.values():
            async with attacker.stream(RpcService.FETCH) as (reader, writer):
                writer.write(sent)
                assert await asyncio.wait_for(reader.read(), 10) == b""
        for reason, count in before.items():
            await victim.until_above(count, lambda reason=reason: victim.num_errors("serve_errors", reason))


async def a_malformed_question_is_counted_and_has_no_answer(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
        for number, question in enumerate(QUESTIONS.values()):
            answered = await attacker.gossip.request_backfill(attacker.victim_id, question)
            assert answered.bodies == ()
            await victim.until_above(number, lambda: victim.num_refused_of(attacker.peer_id, "question_parse"))


async def an_invalid_stream_ends_while_others_are_pulled(scene: Scene) -> None:
    victim, honest = scene.victim, scene.honest

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


async def slow_requests_are_ended_while_others_are_served(scene: Scene) -> None:
    """The attacker sends one byte per second on as many streams as a peer may open."""
    victim, honest = scene.victim, scene.honest
    async with scene.member() as attacker:
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
        await assert_served(honest)
        await slow
        await victim.until_above(before, lambda: victim.num_errors("serve_errors", "timed_out"))


async def assert_served(honest: Member) -> None:
    fetched = await honest.gossip.fetch(honest.victim_id, [bytes(32)])
    assert fetched.outcome == "complete", "each peer has a separate budget"


async def streams_above_the_limit_of_a_peer_are_refused(scene: Scene) -> None:
    victim, honest = scene.victim, scene.honest
    async with scene.member() as attacker:
        before = await victim.num_errors("serve_errors", "flood")

        async def hold() -> None:
            with suppress(*GONE):
                async with attacker.stream(RpcService.FETCH) as (reader, writer):
                    writer.write(HEADER.pack(Frame.REQUEST, 32))
                    await reader.read()

        held = asyncio.gather(*(hold() for _ in range(NUM_OPEN)))
        await victim.until_above(before, lambda: victim.num_errors("serve_errors", "flood"))
        await assert_served(honest)
        await held
        await victim.until(lambda: victim.num_errors("serve_errors", "busy"))


async def requests_above_the_budget_are_answered_with_busy(scene: Scene, service: RpcService) -> None:
    """It requests in parallel until the node is busy, because the budget refills while a slow machine requests."""
    victim = scene.victim
    before, outcomes = await victim.num_errors("serve_errors", "over_requests"), set[str]()

    async def request(attacker: Member) -> None:
        call = attacker.gossip.request_backfill if service is RpcService.ASK else attacker.gossip.fetch
        while "busy" not in outcomes:
            answered = await call(attacker.victim_id, b"" if service is RpcService.ASK else [bytes(32)])
            outcomes.add(str(answered.outcome))

    async with scene.member() as attacker, asyncio.timeout(BUSY_WITHIN_S):
        await asyncio.gather(*(request(attacker) for _ in range(NUM_PARALLEL_REQUESTS)))
    assert outcomes == {"complete", "busy"}
    await victim.until_above(before, lambda: victim.num_errors("serve_errors", "over_requests"))
    await assert_served(scene.honest)


async def a_banned_peer_is_not_served(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
        await attacker.announce_until_requested(FALSE_GROUPS["random bytes for a body"].make(attacker))
        await victim.until(lambda: victim.is_banned(attacker.peer_id))
        before = await victim.num_errors("serve_errors", "refused")
        assert (await attacker.gossip.fetch(attacker.victim_id, [bytes(32)])).outcome == "broken"
        await victim.until_above(before, lambda: victim.num_errors("serve_errors", "refused"))


async def announced_ids(attacker: Member, count: int) -> list[bytes]:
    ids: list[bytes] = []
    async with asyncio.timeout(60), aclosing(attacker.gossip.announcements()) as announcements:
        async for one in announcements:
            if one.sender == attacker.victim_id:
                ids.append(open_announcement(one.payload).id)
            if len(ids) == count:
                break
    return ids


async def a_confirmation_without_a_fetch_does_not_count(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
        ids = await announced_ids(attacker, NUM_CONFIRMED)
        assert await attacker.gossip.confirm(attacker.victim_id, ids)
        confirmed = [event for event in victim.node.events("confirmed") if event["peer"] == attacker.peer_id]
        assert confirmed == []
        fetched = await attacker.gossip.fetch(attacker.victim_id, ids[:1])
        assert len(fetched.bodies) == 1
        assert await attacker.gossip.confirm(attacker.victim_id, ids)

        async def is_confirmed() -> list[dict[str, object]]:
            return [event for event in victim.node.events("confirmed") if event["peer"] == attacker.peer_id]

        confirmed = await victim.until(is_confirmed)
        assert [event["group"] for event in confirmed] == [ids[0].hex()], "only the fetched group counts"


async def test_the_victim_serves_and_pulls_while_streams_are_misused(scene, honest):
    budgets = (
        partial(requests_above_the_budget_are_answered_with_busy, scene, service)
        for service in (RpcService.ASK, RpcService.FETCH)
    )
    attacks = (
        malformed_frames_are_counted,
        a_malformed_question_is_counted_and_has_no_answer,
        an_invalid_stream_ends_while_others_are_pulled,
        slow_requests_are_ended_while_others_are_served,
        streams_above_the_limit_of_a_peer_are_refused,
        a_banned_peer_is_not_served,
        a_confirmation_without_a_fetch_does_not_count,
    )
    await asyncio.gather(scene.run(*attacks), *(attack() for attack in budgets))
