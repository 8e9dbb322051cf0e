"""Attackers by number or by form: floods, streams, the directory and the status port, as the tests have it."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.gossip import MAX_ANSWERS
from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.wire_format import HEADER, Frame, RpcService, bucket_key, record_key
from ftis_node.records.envelope import seal_group
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import bucket_of
from tests.attacks import test_directory_addresses, test_http, test_numbers, test_streams
from tests.attacks.test_bodies import SERVERS

if TYPE_CHECKING:
    from tests.attacks.endurance.target import Scene
    from tests.attacks.member import Member

NUM_NOTHING, AT_ONCE = 4_000, 8
NUM_RUBBISH, NUM_REQUESTS, NUM_QUESTIONS, NUM_STREAMS = 12, 300, 60, 30
NUM_SLOW, NUM_HANDS, NUM_UNREAL, NUM_CONNECTIONS = 4, 100, 200, 50
STAY_S, SLOW_S, CONNECTED_S = 8.0, 12.0, 4.0
GONE = (OSError, EOFError, P2pdError)  # the node has had enough of us


async def serve_wrongly(name: str, scene: Scene) -> int:
    """A peer whose streams are none: the node asks it for groups that it announces."""
    async with scene.member(script=SERVERS[name][0]) as member:
        ends_at = time.monotonic() + STAY_S
        while time.monotonic() < ends_at:
            one = os.urandom(32)
            await member.gossip.announce(member.claim(one, b"", envelope_bytes=200))
            await asyncio.sleep(0.25)
    return 1


async def announcements_of_nothing(scene: Scene) -> int:
    """Groups that do not exist, as fast as p2pd takes them."""
    async with scene.member() as member:

        async def say(count: int) -> None:
            for _ in range(count):
                one = os.urandom(32)
                claim = member.claim(one, b"", envelope_bytes=100, number=2**62)
                del member.shelf[one]
                await member.gossip.announce(claim)

        await asyncio.gather(*(say(NUM_NOTHING // AT_ONCE) for _ in range(AT_ONCE)))
    return NUM_NOTHING


async def announcements_that_are_none(scene: Scene) -> int:
    """Random bytes, lengths of 4 GiB, and too many bytes."""
    async with scene.member() as member:
        for _ in range(NUM_RUBBISH):
            said = scene.rng.choice((b"\xffrandom", b"\x12\xff\xff\xff\xff\x0f", bytes(600)))
            await member.gossip.announce(said + os.urandom(4))
            await asyncio.sleep(0.1)
    return NUM_RUBBISH


async def requests(scene: Scene) -> int:
    """More requests for groups than a peer has a budget for."""
    async with scene.member() as member:
        for _ in range(NUM_REQUESTS):
            await member.gossip.fetch(member.victim_id, [os.urandom(32)])
    return NUM_REQUESTS


async def questions(scene: Scene) -> int:
    """Questions without end, some of which are none."""
    async with scene.member() as member:
        for _ in range(NUM_QUESTIONS):
            question = scene.rng.choice((b"", b"\xff\xffrubbish", test_streams.VARINT_4_GIB))
            await member.gossip.request_backfill(member.victim_id, question)
    return NUM_QUESTIONS


async def rubbish_on_streams(scene: Scene) -> int:
    """Frames that are none, on every service of the run."""
    async with scene.member() as member:
        sent = [*(data for data, _ in test_streams.RUBBISH.values()), os.urandom(2000), b""]
        for number in range(NUM_STREAMS):
            with suppress(*GONE):
                async with member.stream(list(RpcService)[number % len(RpcService)]) as (reader, writer):
                    writer.write(scene.rng.choice(sent))
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(4096), STAY_S)
    return NUM_STREAMS


async def slow_requests(scene: Scene) -> int:
    """A byte a second, on as many streams as a peer may have."""
    async with scene.member() as member:

        async def dribble() -> None:
            with suppress(*GONE, TimeoutError):
                async with asyncio.timeout(SLOW_S), member.stream(RpcService.FETCH) as (_, writer):
                    for byte in HEADER.pack(Frame.REQUEST, 64) + bytes(64):
                        writer.write(bytes([byte]))
                        await asyncio.sleep(1.0)

        await asyncio.gather(*(dribble() for _ in range(NUM_SLOW)))
    return NUM_SLOW


async def false_confirmations(scene: Scene) -> int:
    """Of groups that it was never sent: made-up ones."""
    async with scene.member() as member:
        for _ in range(NUM_RUBBISH):
            await member.gossip.confirm(member.victim_id, [os.urandom(32)])
    return NUM_RUBBISH


async def late_answers(scene: Scene) -> int:
    """A page of answers whose times are the largest that there are."""

    def prepare(member: Member) -> None:
        late = test_numbers.LARGEST
        page = [test_numbers._announcement(member, at, created_ms=late) for at in range(test_numbers.PAGE)]
        member.answers = lambda: page

    async with scene.member(prepare=prepare):
        await asyncio.sleep(STAY_S)
    return 1


async def records_out_of_bounds(scene: Scene) -> int:
    """Its own record, well signed, with numbers at the ends of their types."""
    async with scene.member() as member:
        for changes in test_numbers.RECORDS.values():
            await member.gossip.publish_record(test_numbers._record(member, **changes), ttl_s=60)
        await asyncio.sleep(STAY_S / 2)
    return len(test_numbers.RECORDS)


async def records_of_others(scene: Scene) -> int:
    """Entries of the directory that are too large, for too long, in another's place, or rubbish."""
    async with scene.member() as member:
        run_id, node = member.maker.manifest.run_id, member.link.directory._node
        soon, late = time.time() + 300, time.time() + 30 * 365 * 86400.0
        entry = sign_entry(member.identity, EntryKind.RECORD, run_id, b"x", expires_at=soon)
        long = sign_entry(member.identity, EntryKind.RECORD, run_id, b"x", expires_at=late)
        own, others = record_key(run_id, member.peer_id), record_key(run_id, member.victim_id)
        tried = [(own, bytes(3 << 20), soon), (own, long, late), (others, entry, soon), (own, os.urandom(500), soon)]
        for key, value, expires_at in tried:
            await node.store(key, value, expires_at)
    return len(tried)


async def addresses_that_are_none(scene: Scene) -> int:
    """Members in the directory whose addresses no dialer takes."""
    async with scene.member() as member:
        await test_directory_addresses.register(member, 9)
    return len(test_directory_addresses.WAYS) * test_directory_addresses.NUM_OF_EACH


async def unreal_members(scene: Scene) -> int:
    """Members in the directory that do not exist."""
    async with scene.member() as member:
        run_id, expires_at = member.maker.manifest.run_id, time.time() + 120
        payload = pack_member(["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWNobody"], num_shards=1)
        nobodies = [Identity.generate() for _ in range(NUM_UNREAL)]
        await member.link.directory._node.store_many(
            [bucket_key(run_id, bucket_of(one.peer_id)) for one in nobodies],
            [sign_entry(one, EntryKind.MEMBER, run_id, payload, expires_at=expires_at) for one in nobodies],
            expires_at,
            subkeys=[one.peer_id for one in nobodies],
        )
    return NUM_UNREAL


async def identities_of_one_hand(scene: Scene) -> int:
    """Good groups of many senders that one peer hands over."""

    def prepare(member: Member) -> None:
        claims = []
        for one in (Identity.generate() for _ in range(NUM_HANDS)):
            envelope = seal_group(replace(scene.maker.group(one, 1), created_at=time.time()), one)
            claims.append(member.claim(envelope.id, envelope.to_bytes(), sender=one.peer_id, number=1))
        pages = itertools.chain([claims[:MAX_ANSWERS]], itertools.repeat([]))
        member.answers = lambda: next(pages)

    async with scene.member(prepare=prepare) as member:
        await asyncio.sleep(2 * STAY_S)
        return len(member.requested_ids)


async def status_port(scene: Scene) -> int:
    """Connections that say nothing or half a request, and requests that are none."""
    bad = [*test_http.BAD.values(), test_http.HALF, b""]
    async with AsyncExitStack() as stack:
        for number in range(NUM_CONNECTIONS):
            with suppress(OSError):
                _, writer = await test_http.connect(scene.victim)
                stack.callback(writer.transport.abort)
                writer.write(bad[number % len(bad)])
        await asyncio.sleep(CONNECTED_S)
    return NUM_CONNECTIONS
