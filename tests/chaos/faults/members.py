"""Malicious members: one joins, attacks the victim, and leaves. tests/attacks/ tests each attack alone.

Here the victim is part of a swarm with other faults.
"""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from ftis_node.gossip.frames import HEADER, Frame
from ftis_node.gossip.names import RpcService
from tests.attacks.false_groups import FALSE_GROUPS
from tests.attacks.member import GONE, Member, Scene
from tests.attacks.messages import ANNOUNCEMENTS, FOUR_GIB
from tests.attacks.victim import Victim
from tests.chaos.faults.base import Fault, FaultContext, trains

Attack = Callable[[Member, Scene], Awaitable[object]]

REFUSED_WITHIN_S = 240.0  # a busy machine
ANNOUNCE_PERIOD_S = 3.0
MAX_TOKENS = 6  # of the swarm's completions
FALSE_CLAIMS = (  # those that do not depend on the length of a completion
    *("ids out of range", "ids below zero", "NaN", "+inf", "-inf", "positive log-probs", "wrong claimed rewards"),
    *("a changed problem", "an end id out of range", "groups of one", "another run", "a clock a day ahead"),
    *("a clock a day behind", "a temperature of NaN", "a top_p of NaN"),
)
MALFORMED_BODIES = (
    "random bytes for a body", "a varint of 4 GiB for a body", "no bytes for a body", "unsolicited bodies",
)  # fmt: skip
NUM_NONEXISTENT, NUM_AT_ONCE = 4_000, 8
NUM_STREAMS, HELD_S = 30, 12.0
NUM_INVENTED, LISTED_S = 200, 120.0


async def send_false_groups(member: Member, scene: Scene, *, names: tuple[str, ...]) -> None:
    """Send groups of one kind until they are refused, and until the ban if the kind bans."""
    kind, victim = FALSE_GROUPS[scene.rng.choice(names)], scene.victim

    async def announce() -> None:
        while True:
            for claim in kind.make(member).values():  # new ones: the victim requests no more than it needs
                await member.gossip.announce(claim)
            await asyncio.sleep(ANNOUNCE_PERIOD_S)

    announcing = asyncio.create_task(announce())
    try:
        await victim.until(lambda: victim.num_refused_of(member.peer_id, kind.reason), within_s=REFUSED_WITHIN_S)
        if kind.bans:
            await victim.until(lambda: victim.is_banned(member.peer_id), within_s=REFUSED_WITHIN_S)
    finally:
        announcing.cancel()


async def send_malformed_announcements(member: Member, scene: Scene) -> None:
    async def is_banned() -> bool:
        payload, _ = scene.rng.choice(list(ANNOUNCEMENTS.values()))
        await member.gossip.announce(payload + os.urandom(4))
        return await scene.victim.is_banned(member.peer_id)

    await scene.victim.until(is_banned, within_s=REFUSED_WITHIN_S)


async def announce_nonexistent(member: Member, scene: Scene) -> None:
    await member.announce_nonexistent(NUM_NONEXISTENT, num_at_once=NUM_AT_ONCE)


async def hold_streams(member: Member, scene: Scene) -> None:
    """Open requests that never end, and one with a length of 4 GiB."""

    async def hold(length: int) -> None:
        with suppress(*GONE, TimeoutError):
            async with asyncio.timeout(HELD_S), member.stream(RpcService.FETCH) as (reader, writer):
                writer.write(HEADER.pack(Frame.REQUEST, length))
                await reader.read()

    await asyncio.gather(*map(hold, [FOUR_GIB, *[32] * NUM_STREAMS]))


async def register_invented(member: Member, scene: Scene) -> None:
    await member.register([["/ip4/127.0.0.1/tcp/9"]] * NUM_INVENTED, ttl_s=LISTED_S)


def inject(context: FaultContext, *, attack: Attack) -> None:
    asyncio.run(_join_and_attack(context, attack))


async def _join_and_attack(context: FaultContext, attack: Attack) -> None:
    """Join as a new member, attack, and leave."""
    maker, victim = _maker(context.swarm.models["s"], context.swarm.folder / "run.toml"), Victim(context.node.process)
    with tempfile.TemporaryDirectory(prefix="ftis") as sockets:
        scene = Scene(victim, maker, Path(sockets), context.rng)
        async with scene.member() as member:
            member.num_tokens = MAX_TOKENS
            await attack(member, scene)


@cache
def _maker(model: Path, run: Path) -> GroupMaker:
    return GroupMaker(model, load_manifest(str(run)))


def _fault(name: str, promise: str, attack: Attack) -> Fault:
    return Fault("members", name, promise, partial(inject, attack=attack), fits=trains)


FAULTS = (
    _fault("false-claims", "Groups with false claims are refused with the reason. A certain one bans their sender.",
           partial(send_false_groups, names=FALSE_CLAIMS)),
    _fault("malformed-bodies", "Bodies that are no envelopes are refused, and their sender is banned.",
           partial(send_false_groups, names=MALFORMED_BODIES)),
    _fault("malformed-announcements", "They are counted, not logged one by one, and their sender is banned.",
           send_malformed_announcements),
    _fault("flood", "Many announcements cost neither memory nor disk. Others are received meanwhile.",
           announce_nonexistent),
    _fault("open-streams", "Requests that never end are cut. Others are served meanwhile.", hold_streams),
    _fault("invented-members", "Members that do not exist hide no real member.", register_invented),
)  # fmt: skip
