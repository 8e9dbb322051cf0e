"""Attackers that send floods or malformed data: announcements, streams, directory entries and HTTP requests."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

from ftis_node.gossip.directory.entries import EntryKind, sign_entry
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.wire_format import HEADER, Frame, RpcService, record_key
from ftis_node.records.identity import Identity
from tests.attacks import test_directory_addresses, test_http, test_numbers, test_streams
from tests.attacks.test_bodies import SERVERS

if TYPE_CHECKING:
    from tests.attacks.endurance.target import Scene
    from tests.attacks.member import Member

NUM_NONEXISTENT, AT_ONCE = 4_000, 8
NUM_MALFORMED, NUM_REQUESTS, NUM_QUESTIONS, NUM_STREAMS = 12, 300, 60, 30
NUM_SLOW, NUM_RELAYED, NUM_INVENTED, NUM_CONNECTIONS = 4, 100, 200, 50
STAY_S, SLOW_S, CONNECTED_S = 8.0, 12.0, 4.0
GONE = (OSError, EOFError, P2pdError)  # the node closed the connection


async def invalid_server(name: str, scene: Scene) -> int:
    """Announce groups and answer the node's requests with an invalid stream."""
    async with scene.member(script=SERVERS[name][0]) as member:
        ends_at = time.monotonic() + STAY_S
        while time.monotonic() < ends_at:
            one = os.urandom(32)
            await member.gossip.announce(member.claim(one, b"", envelope_bytes=200))
            await asyncio.sleep(0.25)
    return 1


async def nonexistent_groups(scene: Scene) -> int:
    """Announce nonexistent groups as fast as p2pd accepts them."""
    async with scene.member() as member:
        await member.announce_nonexistent(NUM_NONEXISTENT, num_at_once=AT_ONCE)
    return NUM_NONEXISTENT


async def invalid_announcements(scene: Scene) -> int:
    """Announce random bytes, lengths of 4 GiB, and too many bytes."""
    async with scene.member() as member:
        for _ in range(NUM_MALFORMED):
            payload = scene.rng.choice((b"\xffrandom", b"\x12\xff\xff\xff\xff\x0f", bytes(600)))
            await member.gossip.announce(payload + os.urandom(4))
            await asyncio.sleep(0.1)
    return NUM_MALFORMED


async def requests(scene: Scene) -> int:
    """Send more requests for groups than the budget of a peer allows."""
    async with scene.member() as member:
        for _ in range(NUM_REQUESTS):
            await member.gossip.fetch(member.victim_id, [os.urandom(32)])
    return NUM_REQUESTS


async def questions(scene: Scene) -> int:
    """Ask too many questions, some of them malformed."""
    async with scene.member() as member:
        for _ in range(NUM_QUESTIONS):
            question = scene.rng.choice((b"", b"\xff\xffrandom", test_streams.VARINT_4_GIB))
            await member.gossip.request_backfill(member.victim_id, question)
    return NUM_QUESTIONS


async def malformed_frames(scene: Scene) -> int:
    """Send malformed frames to each service of the run."""
    async with scene.member() as member:
        sent = [*test_streams.MALFORMED.values(), os.urandom(2000), b""]
        for number in range(NUM_STREAMS):
            with suppress(*GONE):
                async with member.stream(list(RpcService)[number % len(RpcService)]) as (reader, writer):
                    writer.write(scene.rng.choice(sent))
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(4096), STAY_S)
    return NUM_STREAMS


async def slow_requests(scene: Scene) -> int:
    """Send one byte per second on as many streams as a peer may open."""
    async with scene.member() as member:

        async def send_slowly() -> None:
            with suppress(*GONE, TimeoutError):
                async with asyncio.timeout(SLOW_S), member.stream(RpcService.FETCH) as (_, writer):
                    for byte in HEADER.pack(Frame.REQUEST, 64) + bytes(64):
                        writer.write(bytes([byte]))
                        await asyncio.sleep(1.0)

        await asyncio.gather(*(send_slowly() for _ in range(NUM_SLOW)))
    return NUM_SLOW


async def false_confirmations(scene: Scene) -> int:
    """Confirm invented groups."""
    async with scene.member() as member:
        for _ in range(NUM_MALFORMED):
            await member.gossip.confirm(member.victim_id, [os.urandom(32)])
    return NUM_MALFORMED


async def late_answers(scene: Scene) -> int:
    """Answer with a page of announcements with the largest possible time."""

    def prepare(member: Member) -> None:
        late = test_numbers.LARGEST
        page = [test_numbers._announcement(member, at, created_ms=late) for at in range(test_numbers.PAGE)]
        member.answers = lambda: page

    async with scene.member(prepare=prepare):
        await asyncio.sleep(STAY_S)
    return 1


async def records_out_of_bounds(scene: Scene) -> int:
    """Publish signed records with numbers at the limits of their types."""
    async with scene.member() as member:
        for changes in test_numbers.RECORDS.values():
            await member.gossip.publish_record(test_numbers._record(member, **changes), ttl_s=60)
        await asyncio.sleep(STAY_S / 2)
    return len(test_numbers.RECORDS)


async def invalid_records(scene: Scene) -> int:
    """Store directory entries that are too large, valid for too long, under another peer's key, or random."""
    async with scene.member() as member:
        run_id, node = member.maker.manifest.run_id, member.link.directory._node
        soon, late = time.time() + 300, time.time() + 30 * 365 * 86400.0
        entry = sign_entry(member.identity, EntryKind.RECORD, run_id, b"x", expires_at=soon)
        long = sign_entry(member.identity, EntryKind.RECORD, run_id, b"x", expires_at=late)
        own, others = record_key(run_id, member.peer_id), record_key(run_id, member.victim_id)
        records = [(own, bytes(3 << 20), soon), (own, long, late), (others, entry, soon), (own, os.urandom(500), soon)]
        for key, value, expires_at in records:
            await node.store(key, value, expires_at)
    return len(records)


async def invalid_addresses(scene: Scene) -> int:
    """Register members whose addresses cannot be dialed."""
    async with scene.member() as member:
        await test_directory_addresses.register(member, 9)
    return len(test_directory_addresses.INVALID_ADDRESSES) * test_directory_addresses.NUM_EACH


async def invented_members(scene: Scene) -> int:
    """Register members that do not exist."""
    async with scene.member() as member:
        await member.register_invented(NUM_INVENTED, ttl_s=120)
    return NUM_INVENTED


async def relayed_identities(scene: Scene) -> int:
    """Announce and serve valid groups of many invented senders."""

    def prepare(member: Member) -> None:
        member.answer_with_groups_of([Identity.generate() for _ in range(NUM_RELAYED)])

    async with scene.member(prepare=prepare) as member:
        await asyncio.sleep(2 * STAY_S)
        return len(member.requested_ids)


async def status_port(scene: Scene) -> int:
    """Open connections with no request, half a request or an invalid request."""
    requests = [*test_http.INVALID_REQUESTS.values(), test_http.HALF_REQUEST, b""]
    async with AsyncExitStack() as stack:
        for number in range(NUM_CONNECTIONS):
            with suppress(OSError):
                _, writer = await test_http.connect(scene.victim)
                stack.callback(writer.transport.abort)
                writer.write(requests[number % len(requests)])
        await asyncio.sleep(CONNECTED_S)
    return NUM_CONNECTIONS
