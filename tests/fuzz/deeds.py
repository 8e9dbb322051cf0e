"""What a hostile member may do in one step of a battle. Values come from the random source that a rule is given."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.stubs.stub_node import FINGERPRINT, stub_group
from ftis_node.errors import RecordError
from ftis_node.gossip.wire_format import RpcService
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import CODECS, hash_messages, pack_group, pack_text_group, unpack_any
from ftis_node.records.envelope import Announcement, open_envelope
from ftis_node.records.group import FinishReason, TextCompletion
from ftis_node.records.peer_messages import BackfillRequest
from tests.conftest import make_text_group
from tests.fuzz.battle import RUN, Battle
from tests.fuzz.hostile import ADDRESSES, MANNERS, Hostile
from tests.fuzz.mutator import change_field

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

JUMPS_S = (-7200.0, -90.0, -30.0, 1.0, 30.0, 90.0, 3600.0)
OTHER_TOKENIZER = b"\xff" * 8  # its beginning, as announced
NUMBERS = (0, 1, 2, 3, 2**31, 2**53, 2**63 - 2, 2**63 - 1)


async def announce(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """Any fields: own ids, others', the victim's; past, future; of others; again and again."""
    if not who.shelf:
        await make(battle, who, rng)
    held = list(who.shelf)
    own = battle.victim.parts.reader.own_ready()[:1]
    stored = battle.victim.parts.reader.list_groups(limit=3)
    known = [bytes.fromhex(group.id) for group in stored]
    senders = [one.parts.context.peer_id for one in (battle.victim, battle.honest)] + [
        m.peer_id for m in battle.hostile
    ]
    announcement = Announcement(
        id=rng.choice([*held, *held, *known, *own, rng.randbytes(32)]),
        number=rng.choice([*NUMBERS[1:], rng.randrange(1, 200), _number_of(battle, held[-1], who)]),
        envelope_bytes=rng.choice((1, 600, len(who.shelf[held[-1]]), 4 << 20)),
        num_tokens=rng.choice((1, 48, 524_288)),
        tokenizer=rng.choice((bytes.fromhex(FINGERPRINT)[:8], b"\x01" * 8, OTHER_TOKENIZER)),
        policy_version=rng.choice(NUMBERS),
        created_at=battle.clock.time() + rng.choice((0.0, 0.0, 0.0, -1.0, 59.0, 61.0, -1700.0, -1900.0, 1e6)),
        attempt=rng.choice((0, 0, 0, 1, 255)),
        sender=rng.choice([None, None, None, *senders]),
    )
    message = pb.Announcement.FromString(announcement.to_bytes())
    if rng.random() < 0.2:
        change_field(message, rng)
    payload = message.SerializeToString() if rng.random() < 0.97 else rng.randbytes(rng.choice((0, 80, 600)))
    who.answers = [*who.answers[-40:], payload]
    for _ in range(rng.choice((1, 1, 1, 2, 30))):
        await who.announce(payload, shard=rng.choice((0, 0, 0, 1, 63)))


def _number_of(battle: Battle, group_id: bytes, who: Hostile) -> int:
    with suppress(RecordError):
        return max(1, unpack_any(open_envelope(who.shelf[group_id]).body).number)
    return 1


async def offer(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """A group in good form, or with one or two fields changed, announced as it is."""
    group_id = await make(battle, who, rng)
    payload = Announcement(
        id=group_id,
        number=_number_of(battle, group_id, who),
        envelope_bytes=len(who.shelf[group_id]),
        num_tokens=48,
        tokenizer=bytes.fromhex(FINGERPRINT)[:8],
        policy_version=1,
        created_at=battle.clock.time(),
    ).to_bytes()
    who.answers = [*who.answers[-40:], payload]
    await who.announce(payload)


async def make(battle: Battle, who: Hostile, rng: random.Random) -> bytes:
    """A body on the shelf: right, of another codec, with changed fields, under a number used before."""
    group = replace(
        stub_group(who.identity, RUN, battle.rng_groups, num_tokens=4),
        number=rng.choice((rng.randrange(1, 40), rng.randrange(1, 10**6), *NUMBERS)),
        created_at=round(battle.clock.time() + rng.choice((0.0, 0.0, 0.0, -3.0, 50.0, 120.0, -1790.0)), 3),
        weights_of=rng.choice((None, None, battle.victim.parts.context.peer_id, who.peer_id)),
    )
    body = pb.Body.FromString(pack_group(group, codec=rng.choice(tuple(CODECS))))
    for _ in range(rng.choice((0, 0, 1, 2))):
        change_field(body, rng)
    if rng.random() < 0.1:
        body.codec = rng.randrange(6)
    if rng.random() < 0.1:
        body.sender = battle.honest.parts.context.identity.peer
    return who.sign_body(body.SerializeToString())


async def two_under_one_number(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """Two bodies of one number, both announced before either is pulled."""
    number = rng.randrange(1, 10**6)
    for _ in range(2):
        group = replace(
            stub_group(who.identity, RUN, battle.rng_groups, num_tokens=4),
            number=number,
            created_at=round(battle.clock.time(), 3),
        )
        group_id = who.sign_body(pack_group(group))
        await who.announce(
            Announcement(group_id, number, 700, 48, bytes.fromhex(FINGERPRINT)[:8], 1, battle.clock.time()).to_bytes()
        )


async def forge(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """A group in good form that names the honest member as its sender, under the own signature."""
    group = replace(
        stub_group(battle.honest.parts.context.identity, RUN, battle.rng_groups, num_tokens=4),
        number=battle.num_honest + rng.randrange(1, 1000),
        created_at=round(battle.clock.time(), 3),
    )
    group_id = who.sign_body(pack_group(group))
    claim = Announcement(group_id, group.number, 700, 48, bytes.fromhex(FINGERPRINT)[:8], 1, battle.clock.time())
    await who.announce(replace(claim, sender=rng.choice((None, group.sender))).to_bytes())


async def tell(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """A group of another tokenizer, told as text: well, with changed fields, or as the text of somebody's group."""
    known = [bytes.fromhex(group.id) for group in battle.victim.parts.reader.list_groups(limit=3)]
    exact_id = rng.choice([rng.randbytes(32), rng.randbytes(32), *known])
    exact = stub_group(who.identity, RUN, battle.rng_groups, num_tokens=4)
    completion = TextCompletion("10 11", -0.5, 3, FinishReason.LENGTH)
    told = make_text_group(
        who.identity,
        run_id=RUN.run_id,
        number=rng.randrange(1, 10**6),
        prompt_ref=exact.prompt_ref,
        prompt_hash=hash_messages(({"role": "user", "content": ""},)),
        created_at=round(battle.clock.time(), 3),
        retells=exact_id,
        completions=tuple(replace(completion, text=f"{10 + at} 11", mean_logprob=-0.5 - at / 8) for at in range(12)),
    )
    body = pb.Body.FromString(pack_text_group(told))
    for _ in range(rng.choice((0, 0, 1, 2))):
        change_field(body, rng)
    who.shelf[exact_id] = who.shelf[who.sign_body(body.SerializeToString())]
    await who.announce(Announcement(exact_id, told.number, 700, 48, OTHER_TOKENIZER, 1, battle.clock.time()).to_bytes())


async def resend(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """Somebody's old envelope again, whole or damaged, as an own one."""
    stored = [group.id for group in battle.victim.parts.reader.list_groups(limit=20)]
    if not stored:
        return
    found = battle.victim.parts.reader.envelopes([bytes.fromhex(rng.choice(stored))])
    for data in found:
        damaged = bytearray(data)
        if rng.random() < 0.5:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        group_id = who.put(bytes(damaged))
        claim = Announcement(group_id, 1, len(data), 48, bytes.fromhex(FINGERPRINT)[:8], 1, battle.clock.time())
        await who.announce(replace(claim, sender=rng.choice((None, battle.honest.parts.context.peer_id))).to_bytes())


async def behave(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """Another manner of answering."""
    service = rng.choice((RpcService.FETCH, RpcService.FETCH, RpcService.ASK, RpcService.ASK, RpcService.CONFIRM))
    who.manners[service] = rng.choice(MANNERS)
    if rng.random() < 0.3:
        who.manners = dict.fromkeys(RpcService, "right")


async def describe(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """A directory record with any values."""
    info = pb.PeerInfo(
        schema=1,
        run=bytes.fromhex(RUN.run_id),
        name="n",
        model="m",
        tokenizer=bytes.fromhex(FINGERPRINT),
        role=rng.choice(("full", "generator", "learner", "exchange", "x")),
        last_number=rng.choice((*NUMBERS, 2**64 - 1)),
        created_ms=round(battle.clock.time() * 1000),
    )
    for _ in range(rng.choice((0, 1, 3))):
        change_field(info, rng)
    record = who.publish_info(info) if rng.random() < 0.9 else rng.randbytes(rng.choice((0, 100, 3000)))
    owner = rng.choice((who.peer_id, who.peer_id, who.peer_id, rng.choice(battle.hostile).peer_id))
    battle.swarm.put_record(owner, record, run_id=RUN.run_id, ttl_s=600.0)


async def ask(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """Any question, any ids, any confirmation; also bytes that are none."""
    stored = [bytes.fromhex(group.id) for group in battle.victim.parts.reader.list_groups(limit=8)]
    ids = b"".join(rng.choices([*stored, rng.randbytes(32)], k=rng.choice((1, 2, 64, 65))))
    question = pb.Question.FromString(
        BackfillRequest(sender=rng.choice((None, battle.honest.parts.context.peer_id)), first_number=0).to_bytes()
    )
    for _ in range(rng.choice((0, 1, 2))):
        change_field(question, rng)
    service = rng.choice(list(RpcService))
    request = question.SerializeToString() if service is RpcService.ASK else ids
    if rng.random() < 0.1:
        request = rng.randbytes(rng.choice((0, 31, 33, 4096)))
    served = rng.choice((battle.victim, battle.victim, battle.honest)).gossip
    frames = served.serve_stream(who.peer_id, service, request)  # type: ignore[attr-defined]
    try:
        async for _ in frames:
            if rng.random() < 0.1:  # it goes away in the middle
                break
    finally:
        await frames.aclose()


async def move(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """Other addresses."""
    who.claimed = rng.choices(ADDRESSES, k=rng.randrange(4))


async def come_and_go(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """Leaves, comes back, or comes back as somebody else: an identity costs nothing."""
    if who._is_up:
        await who.close()
    elif battle.victim.parts.peers.is_banned(who.peer_id) or rng.random() < 0.3:
        battle.hostile.remove(who)
        newcomer = await battle.newcomer()
        newcomer.shelf, newcomer.answers = dict(who.shelf), list(who.answers)
    else:
        await who.start()


async def move_clock(battle: Battle, who: Hostile, rng: random.Random) -> None:
    """The machine's calendar is set; what is on its way then may rightly be refused."""
    if rng.random() < 0.3:
        battle.clock.moved_s += rng.choice(JUMPS_S)
        battle._due.clear()


RULES: dict[str, Callable[[Battle, Hostile, random.Random], Awaitable[Any]]] = {
    rule.__name__: rule
    for rule in (
        *(announce, offer, make, two_under_one_number, forge, tell),
        *(resend, behave, describe, ask, move, come_and_go, move_clock),
    )
}
WEIGHTS = {"tell": 2, "announce": 6, "offer": 6, "ask": 3, "behave": 3, "come_and_go": 3}
CHOICES = tuple(name for name in RULES for _ in range(WEIGHTS.get(name, 1)))
