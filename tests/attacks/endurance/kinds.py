"""All kinds of attackers. An action is a visit, group, announcement, request or entry, depending on the kind."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial

from ftis_node.gossip.wire_format import HEADER, Frame, RpcService
from ftis_node.records.identity import Identity
from tests.attacks import false_groups, messages, test_http
from tests.attacks.member import GONE, Claims, Member, Scene
from tests.attacks.visitors.host import Target
from tests.attacks.visitors.visits import AUTHORS, VISITS, Visit

Act = Callable[[Scene], Awaitable[int]]
ActAsMember = Callable[[Member, Scene], Awaitable[int]]


NUM_NONEXISTENT, AT_ONCE = 4_000, 8
NUM_MALFORMED, NUM_REQUESTS, NUM_QUESTIONS, NUM_STREAMS = 12, 300, 60, 30
NUM_SLOW, NUM_RELAYED, NUM_INVENTED, NUM_CONNECTIONS, NUM_PADDED = 4, 100, 200, 50, 20
WITHIN_S, VALIDATED_WITHIN_S = 40.0, 6.0
STAY_S, SLOW_S, CONNECTED_S = 8.0, 12.0, 4.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of attacker. `act` attacks once and returns its actions. No group of a malicious kind may be accepted."""

    name: str
    act: Act
    is_malicious: bool = True
    limit_s: float = 90.0


async def _visit(visit: Visit, scene: Scene) -> int:
    return await visit(Target.of((await scene.victim.addresses())[0], scene.maker), scene.folder())


async def _as_member(act: ActAsMember, scene: Scene) -> int:
    async with scene.member() as member:
        return await act(member, scene)


async def _send_groups(make: Callable[[Member], Claims], member: Member, scene: Scene) -> int:
    """Announce until the node has requested all groups or banned the member; return how many it requested."""
    claims = await asyncio.to_thread(make, member)
    with suppress(TimeoutError):
        await member.announce_until_requested(claims, within_s=WITHIN_S)
    num_requested = len(claims.keys() & member.requested_ids)
    await asyncio.sleep(VALIDATED_WITHIN_S if num_requested else 0)
    return num_requested


def _padded(member: Member) -> Claims:
    return member.claims(*(false_groups.padded_envelope(member) for _ in range(NUM_PADDED)))


async def _serve_invalid_streams(name: str, scene: Scene) -> int:
    async with scene.member(script=messages.SERVERS[name][0]) as member:
        ends_at = time.monotonic() + STAY_S
        while time.monotonic() < ends_at:
            await member.gossip.announce(member.claim(os.urandom(32), b"", envelope_bytes=200))
            await asyncio.sleep(0.25)
    return 1


async def announce_nonexistent(member: Member, scene: Scene) -> int:
    await member.announce_nonexistent(NUM_NONEXISTENT, num_at_once=AT_ONCE)
    return NUM_NONEXISTENT


async def announce_malformed(member: Member, scene: Scene) -> int:
    for _ in range(NUM_MALFORMED):
        payload, _ = scene.rng.choice(list(messages.ANNOUNCEMENTS.values()))
        await member.gossip.announce(payload + os.urandom(4))
        await asyncio.sleep(0.1)
    return NUM_MALFORMED


async def _request(member: Member, scene: Scene) -> int:
    """Send more requests for groups than the budget of a peer allows."""
    for _ in range(NUM_REQUESTS):
        await member.gossip.fetch(member.victim_id, [os.urandom(32)])
    return NUM_REQUESTS


async def _ask(member: Member, scene: Scene) -> int:
    """Ask too many questions, some of them malformed."""
    for _ in range(NUM_QUESTIONS):
        question = scene.rng.choice((b"", *messages.QUESTIONS.values()))
        await member.gossip.request_backfill(member.victim_id, question)
    return NUM_QUESTIONS


async def _send_malformed_frames(member: Member, scene: Scene) -> int:
    sent = [*messages.FRAMES.values(), os.urandom(2000), b""]
    for number in range(NUM_STREAMS):
        with suppress(*GONE):
            async with member.stream(list(RpcService)[number % len(RpcService)]) as (reader, writer):
                writer.write(scene.rng.choice(sent))
                writer.write_eof()
                await asyncio.wait_for(reader.read(4096), STAY_S)
    return NUM_STREAMS


async def hold_streams(member: Member, scene: Scene) -> int:
    """Open requests that never end, and one with a length of 4 GiB."""

    async def hold(length: int) -> None:
        with suppress(*GONE, TimeoutError):
            async with asyncio.timeout(SLOW_S), member.stream(RpcService.FETCH) as (reader, writer):
                writer.write(HEADER.pack(Frame.REQUEST, length))
                await reader.read()

    await asyncio.gather(*map(hold, [false_groups.FOUR_GIB, *[32] * NUM_STREAMS]))
    return 1 + NUM_STREAMS


async def _request_slowly(member: Member, scene: Scene) -> int:
    """Send one byte per second on as many streams as a peer may open."""

    async def send() -> None:
        with suppress(*GONE, TimeoutError):
            async with asyncio.timeout(SLOW_S), member.stream(RpcService.FETCH) as (_, writer):
                for byte in HEADER.pack(Frame.REQUEST, 64) + bytes(64):
                    writer.write(bytes([byte]))
                    await asyncio.sleep(1.0)

    await asyncio.gather(*(send() for _ in range(NUM_SLOW)))
    return NUM_SLOW


async def _confirm_falsely(member: Member, scene: Scene) -> int:
    for _ in range(NUM_MALFORMED):
        await member.gossip.confirm(member.victim_id, [os.urandom(32)])
    return NUM_MALFORMED


async def _answer_late(scene: Scene) -> int:
    async with scene.member(prepare=messages.answer_with_the_largest_time):
        await asyncio.sleep(STAY_S)
    return 1


async def _publish_out_of_bounds(member: Member, scene: Scene) -> int:
    for changes in messages.RECORDS.values():
        await member.gossip.publish_record(messages.record(member, **changes), ttl_s=60)
    await asyncio.sleep(STAY_S / 2)
    return len(messages.RECORDS)


async def _store_invalid(member: Member, scene: Scene) -> int:
    entries = messages.invalid_entries(member, member.victim_id)
    for entry in entries.values():
        await member.link.directory._node.store(*entry)
    return len(entries)


async def _register_invalid(member: Member, scene: Scene) -> int:
    await member.register([(address, "/ip4/127.0.0.1/tcp/9") for address in messages.INVALID_ADDRESSES], ttl_s=120)
    return len(messages.INVALID_ADDRESSES)


async def register_invented(member: Member, scene: Scene) -> int:
    await member.register([["/ip4/127.0.0.1/tcp/9"]] * NUM_INVENTED, ttl_s=120)
    return NUM_INVENTED


async def _relay_identities(scene: Scene) -> int:
    """Announce and serve valid groups of many invented senders."""
    senders = [Identity.generate() for _ in range(NUM_RELAYED)]
    async with scene.member(prepare=lambda member: member.answer_with_groups_of(senders)) as member:
        await asyncio.sleep(2 * STAY_S)
        return len(member.requested_ids)


async def _use_status_port(scene: Scene) -> int:
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


MEMBERS: dict[str, ActAsMember] = {
    "announcements of nonexistent groups": announce_nonexistent,
    "invalid announcements": announce_malformed,
    "requests": _request,
    "questions": _ask,
    "malformed frames": _send_malformed_frames,
    "slow requests": _request_slowly,
    "open streams": hold_streams,
    "false confirmations": _confirm_falsely,
    "records out of bounds": _publish_out_of_bounds,
    "invalid records": _store_invalid,
    "invalid addresses": _register_invalid,
    "invented members": register_invented,
    **{f"false group: {name}": partial(_send_groups, kind.make) for name, kind in false_groups.FALSE_GROUPS.items()},
}
VALID_GROUPS = {"copied completions": false_groups.copied_completions, "used numbers": false_groups.used_numbers}


def all_kinds() -> list[Kind]:
    return [
        *(Kind(name, partial(_visit, visit), is_malicious=False) for name, visit in {**AUTHORS, **VISITS}.items()),
        *(Kind(name, partial(_as_member, act)) for name, act in MEMBERS.items()),
        *(
            Kind(name, partial(_as_member, partial(_send_groups, make)), is_malicious=False)
            for name, make in {**VALID_GROUPS, "padded groups": _padded}.items()
        ),
        *(Kind(f"server: {name}", partial(_serve_invalid_streams, name)) for name in messages.SERVERS),
        Kind("answers with the largest time", _answer_late),
        Kind("identities of one peer", _relay_identities, is_malicious=False),
        Kind("connections to the status port", _use_status_port, is_malicious=False),
    ]
