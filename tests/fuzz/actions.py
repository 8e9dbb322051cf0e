"""The rules of a simulation: actions of a hostile member in one step, with values from a given random source."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from bench.stubs.stub_node import FINGERPRINT, stub_group
from ftis_node.gossip.wire_format import RpcService
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import CODECS, pack_group, pack_text_group
from ftis_node.records.envelope import Announcement
from ftis_node.records.group import FinishReason, Group, TextCompletion
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import BackfillRequest
from tests.conftest import make_text_group
from tests.fuzz.hostile import ADDRESSES, BEHAVIORS, Hostile
from tests.fuzz.mutator import INTEGERS, change_field
from tests.fuzz.simulation import RUN, Simulation
from tests.records.wire_example import sign_peer_info

JUMPS_S = (-7200.0, -90.0, -30.0, 1.0, 30.0, 90.0, 3600.0)
TOKENIZER, OTHER_TOKENIZER = bytes.fromhex(FINGERPRINT)[:8], b"\xff" * 8  # first 8 bytes, as announced
NUMBERS = [number for number in INTEGERS if number < 2**63]


async def announce(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Announce with any fields: ids of any sender, past and future times, other senders, repeatedly."""
    own_ids = list(member.envelopes) or [await make_body(simulation, member, rng)]
    members = [simulation.victim.parts.context, simulation.honest.parts.context, *simulation.hostile]
    announcement = _claim(
        simulation,
        rng.choice([*own_ids, *own_ids, *_stored_ids(simulation, 4), rng.randbytes(32)]),
        rng.choice([*NUMBERS[1:], rng.randrange(1, 200)]),
        envelope_bytes=rng.choice((1, 600, len(member.envelopes[own_ids[-1]]), 4 << 20)),
        num_tokens=rng.choice((1, 48, 524_288)),
        tokenizer=rng.choice((TOKENIZER, b"\x01" * 8, OTHER_TOKENIZER)),
        policy_version=rng.choice(NUMBERS),
        created_at=simulation.clock.time() + rng.choice((0.0, 0.0, 0.0, -1.0, 59.0, 61.0, -1700.0, -1900.0, 1e6)),
        attempt=rng.choice((0, 0, 0, 1, 255)),
        sender=rng.choice([None, None, None, *(one.peer_id for one in members)]),
    )
    message = pb.Announcement.FromString(announcement.to_bytes())
    if rng.random() < 0.2:
        change_field(message, rng)
    payload = message.SerializeToString() if rng.random() < 0.97 else rng.randbytes(rng.choice((0, 80, 600)))
    member.answers = [*member.answers[-40:], payload]
    for _ in range(rng.choice((1, 1, 1, 2, 30))):
        await member.announce(payload, shard=rng.choice((0, 0, 0, 1, 63)))


async def offer(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Announce a group that is valid, or has changed fields."""
    group_id = await make_body(simulation, member, rng)
    payload = _claim(simulation, group_id, member.number_of(group_id)).to_bytes()
    member.answers = [*member.answers[-40:], payload]
    await member.announce(payload)


async def make_body(simulation: Simulation, member: Hostile, rng: random.Random) -> bytes:
    """Store a body: valid, of another codec, with changed fields, or with a used number."""
    group = _group(
        simulation,
        member.identity,
        number=rng.choice((rng.randrange(1, 40), rng.randrange(1, 10**6), *NUMBERS)),
        created_at=round(simulation.clock.time() + rng.choice((0.0, 0.0, 0.0, -3.0, 50.0, 120.0, -1790.0)), 3),
        weights_of=rng.choice((None, None, simulation.victim.parts.context.peer_id, member.peer_id)),
    )
    body = pb.Body.FromString(pack_group(group, codec=rng.choice(tuple(CODECS))))
    for _ in range(rng.choice((0, 0, 1, 2))):
        change_field(body, rng)
    if rng.random() < 0.1:
        body.codec = rng.randrange(6)
    if rng.random() < 0.1:
        body.sender = simulation.honest.parts.context.identity.peer
    return member.sign_body(body.SerializeToString())


async def announce_one_number_twice(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Announce two groups with one number before either is pulled."""
    number = rng.randrange(1, 10**6)
    for _ in range(2):
        group_id = member.sign_body(pack_group(_group(simulation, member.identity, number=number)))
        await member.announce(_claim(simulation, group_id, number).to_bytes())


async def forge(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Announce a group that names the honest member as sender, with the signature of this member."""
    number = simulation.num_honest + rng.randrange(1, 1000)
    group = _group(simulation, simulation.honest.parts.context.identity, number=number)
    claim = _claim(simulation, member.sign_body(pack_group(group)), number, sender=rng.choice((None, group.sender)))
    await member.announce(claim.to_bytes())


async def offer_text(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Announce a text group of another tokenizer: valid, with changed fields, or with the id of another group."""
    exact_id = rng.choice([rng.randbytes(32), rng.randbytes(32), *_stored_ids(simulation, 3)])
    exact = _group(simulation, member.identity)
    text_group = make_text_group(
        member.identity,
        run_id=RUN.run_id,
        number=rng.randrange(1, 10**6),
        prompt_ref=exact.prompt_ref,
        problem_hash=exact.problem_hash,
        created_at=exact.created_at,
        exact_group=exact_id,
        completions=tuple(TextCompletion(f"{10 + at} 11", -0.5 - at / 8, 3, FinishReason.LENGTH) for at in range(12)),
    )
    body = pb.Body.FromString(pack_text_group(text_group))
    for _ in range(rng.choice((0, 0, 1, 2))):
        change_field(body, rng)
    member.envelopes[exact_id] = member.envelopes[member.sign_body(body.SerializeToString())]
    await member.announce(_claim(simulation, exact_id, text_group.number, tokenizer=OTHER_TOKENIZER).to_bytes())


async def resend(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Announce a stored envelope of any sender again, intact or damaged."""
    ids = _stored_ids(simulation, 20)
    for data in simulation.victim.parts.store.reader.envelopes([rng.choice(ids)] if ids else []):
        damaged = bytearray(data)
        if rng.random() < 0.5:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        sender = rng.choice((None, simulation.honest.parts.context.peer_id))
        await member.announce(_claim(simulation, member.put(bytes(damaged)), 1, sender=sender).to_bytes())


async def change_behavior(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Change how this member answers requests of a service."""
    service = rng.choice((RpcService.FETCH, RpcService.FETCH, RpcService.ASK, RpcService.ASK, RpcService.CONFIRM))
    member.behaviors[service] = rng.choice(BEHAVIORS)
    if rng.random() < 0.3:
        member.behaviors = dict.fromkeys(RpcService, "correct")


async def publish_record(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Publish a directory record with any values."""
    info = pb.PeerInfo(
        schema=1,
        run=bytes.fromhex(RUN.run_id),
        tokenizer=bytes.fromhex(FINGERPRINT),
        role=rng.choice(("full", "generator", "learner", "exchange", "x")),
        last_number=rng.choice((*NUMBERS, 2**64 - 1)),
        created_ms=round(simulation.clock.time() * 1000),
    )
    for _ in range(rng.choice((0, 1, 3))):
        change_field(info, rng)
    info.peer = member.identity.peer
    record = sign_peer_info(info.SerializeToString(), member.identity)
    record = record if rng.random() < 0.9 else rng.randbytes(rng.choice((0, 100, 3000)))
    owner = rng.choice((member, member, member, rng.choice(simulation.hostile)))
    simulation.swarm.put_record(owner.peer_id, record, run_id=RUN.run_id, ttl_s=600.0)


async def ask(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Send any request of any service, also malformed bytes."""
    service = rng.choice(list(RpcService))
    request = b"".join(rng.choices([*_stored_ids(simulation, 8), rng.randbytes(32)], k=rng.choice((1, 2, 64, 65))))
    if service is RpcService.ASK:
        sender = rng.choice((None, simulation.honest.parts.context.peer_id))
        question = pb.Question.FromString(BackfillRequest(sender=sender, first_number=0).to_bytes())
        for _ in range(rng.choice((0, 1, 2))):
            change_field(question, rng)
        request = question.SerializeToString()
    if rng.random() < 0.1:
        request = rng.randbytes(rng.choice((0, 31, 33, 4096)))
    served: Any = rng.choice((simulation.victim, simulation.victim, simulation.honest)).gossip
    frames = served.serve_stream(member.peer_id, service, request)
    try:
        async for _ in frames:
            if rng.random() < 0.1:  # the member disconnects before the end
                break
    finally:
        await frames.aclose()


async def change_addresses(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Change the addresses that this member claims."""
    member.claimed = rng.choices(ADDRESSES, k=rng.randrange(4))


async def leave_or_rejoin(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Disconnect, reconnect, or reconnect with a new identity, which costs nothing."""
    if member._is_up:
        await member.close()
    elif simulation.victim.parts.peers.is_banned(member.peer_id) or rng.random() < 0.3:
        simulation.hostile.remove(member)
        replacement = await simulation.add_hostile()
        replacement.envelopes, replacement.answers = dict(member.envelopes), list(member.answers)
    else:
        await member.start()


async def move_clock(simulation: Simulation, member: Hostile, rng: random.Random) -> None:
    """Set the clock of the machine. Groups that are in transit may be refused."""
    if rng.random() < 0.3:
        simulation.clock.moved_s += rng.choice(JUMPS_S)
        simulation.due.clear()


def _group(simulation: Simulation, identity: Identity, **changes: Any) -> Group:
    group = stub_group(identity, RUN, simulation.rng_groups, num_tokens=4)
    return replace(group, **{"created_at": round(simulation.clock.time(), 3)} | changes)


def _claim(simulation: Simulation, group_id: bytes, number: int, **changes: Any) -> Announcement:
    """Return an announcement of a group with 48 tokens."""
    now = simulation.clock.time()
    return replace(Announcement(group_id, number, 700, 48, TOKENIZER, 1, now), **changes)


def _stored_ids(simulation: Simulation, limit: int) -> list[bytes]:
    return [bytes.fromhex(group.id) for group in simulation.victim.parts.store.reader.list_groups(limit=limit)]


RULES: dict[str, Callable[[Simulation, Hostile, random.Random], Awaitable[Any]]] = {
    rule.__name__: rule
    for rule in (
        *(announce, offer, make_body, announce_one_number_twice, forge, offer_text),
        *(resend, change_behavior, publish_record, ask, change_addresses, leave_or_rejoin, move_clock),
    )
}
WEIGHTS = {"offer_text": 2, "announce": 6, "offer": 6, "ask": 3, "change_behavior": 3, "leave_or_rejoin": 3}
CHOICES = tuple(name for name in RULES for _ in range(WEIGHTS.get(name, 1)))
