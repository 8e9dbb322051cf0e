"""Malicious members: one joins, attacks the victim, and leaves. tests/attacks/ tests each attack alone.

Here the victim is part of a swarm with other faults.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from ftis_node.gossip.wire_format import HEADER, Frame, RpcService
from tests.attacks.false_groups import FALSE_GROUPS, FOUR_GIB
from tests.attacks.member import GONE, Member, Scene
from tests.attacks.messages import ANNOUNCEMENTS
from tests.attacks.victim import Victim
from tests.chaos.fault_context import FaultContext
from tests.chaos.faults.base import Fault, trains

Attack = Callable[[FaultContext, Victim, Member], Awaitable[None]]


REFUSED_WITHIN_S = 240.0  # a busy machine
NUM_ANNOUNCEMENTS = 3000
NUM_STREAMS = 12
NUM_INVENTED = 100
INVENTED_LIFE_S = 60.0
MAX_TOKENS = 6  # of the swarm's completions
FALSE_CLAIMS = (
    "ids out of range",
    "NaN",
    "positive log-probs",
    "wrong claimed rewards",
    "groups of one",
    "another run",
)
MALFORMED_BODIES = ("random bytes for a body", "a varint of 4 GiB for a body")


async def send_false_groups(context: FaultContext, victim: Victim, member: Member, *, names: tuple[str, ...]) -> None:
    """Send groups of one kind, and wait for their rejection, and for the ban if the kind bans."""
    name = context.rng.choice(names)
    context.note(name)
    kind = FALSE_GROUPS[name]
    await member.announce_until_requested(kind.make(member), within_s=REFUSED_WITHIN_S)
    await victim.until(lambda: victim.num_refused_of(member.peer_id, kind.reason), within_s=REFUSED_WITHIN_S)
    if kind.bans:
        await victim.until(lambda: victim.is_banned(member.peer_id), within_s=REFUSED_WITHIN_S)


async def send_malformed_announcements(context: FaultContext, victim: Victim, member: Member) -> None:
    """Send announcements that cannot be parsed."""
    payload, _ = ANNOUNCEMENTS["random bytes"]

    async def is_banned() -> bool:
        await member.gossip.announce(payload + os.urandom(4))
        return await victim.is_banned(member.peer_id)

    await victim.until(is_banned, within_s=REFUSED_WITHIN_S)


async def flood_with_announcements(context: FaultContext, victim: Victim, member: Member) -> None:
    """Announce thousands of groups that cannot be fetched."""
    context.note(f"{NUM_ANNOUNCEMENTS} announcements")
    await member.announce_nonexistent(NUM_ANNOUNCEMENTS, num_at_once=1)


async def hold_streams(context: FaultContext, victim: Victim, member: Member) -> None:
    """Open requests that never end, and one with a length of 4 GiB."""

    async def hold(length: int) -> None:
        with suppress(*GONE):
            async with member.stream(RpcService.FETCH) as (reader, writer):
                writer.write(HEADER.pack(Frame.REQUEST, length))
                await reader.read()

    async with asyncio.timeout(REFUSED_WITHIN_S):
        await asyncio.gather(*map(hold, [FOUR_GIB, *[32] * NUM_STREAMS]))


async def list_invented_members(context: FaultContext, victim: Victim, member: Member) -> None:
    """Store members in the directory that do not exist."""
    context.note(f"{NUM_INVENTED} members")
    await member.register([["/ip4/127.0.0.1/tcp/9"]] * NUM_INVENTED, ttl_s=INVENTED_LIFE_S)


def inject(context: FaultContext, *, attack: Attack) -> None:
    """Join as a new member, attack, and leave."""
    asyncio.run(_inject(context, attack))


async def _inject(context: FaultContext, attack: Attack) -> None:
    maker, victim = _maker(context.swarm.models["s"], context.swarm.folder / "run.toml"), Victim(context.node.process)
    with tempfile.TemporaryDirectory(prefix="ftis") as sockets:
        async with Scene(victim, maker, Path(sockets)).member() as member:
            member.num_tokens = MAX_TOKENS
            await attack(context, victim, member)


@cache
def _maker(model: Path, run: Path) -> GroupMaker:
    return GroupMaker(model, load_manifest(str(run)))


def _fault(name: str, promise: str, attack: Attack, shown_by: str) -> Fault:
    shown_by = f"tests/attacks/{shown_by}"
    return Fault(name, "members", promise, shown_by, partial(inject, attack=attack), fits=trains)


FALSE_GROUP_TEST = "test_groups.py::test_each_kind_of_false_group_is_rejected_by_its_name_and_bans_if_it_is_certain"
FAULTS = (
    _fault("false-claims", "Groups with false claims are rejected with the reason. A certain one bans their sender.",
           partial(send_false_groups, names=FALSE_CLAIMS), FALSE_GROUP_TEST),
    _fault("malformed-bodies", "Bodies that are no envelopes are rejected, and their sender is banned.",
           partial(send_false_groups, names=MALFORMED_BODIES), FALSE_GROUP_TEST),
    _fault("malformed-announcements", "They are counted, not logged one by one, and their sender is banned.",
           send_malformed_announcements, "test_floods.py::test_malformed_announcements_are_counted_and_ban"),
    _fault("flood", "Many announcements cost neither memory nor disk. Others are received meanwhile.",
           flood_with_announcements, "test_floods.py::test_thousands_of_announcements_of_nonexistent_groups_ban"),
    _fault("open-streams", "Requests that never end are cut. Others are served meanwhile.", hold_streams,
           "test_streams.py::test_streams_above_the_limit_of_a_peer_are_refused"),
    _fault("invented-members", "Members that do not exist hide no real member.", list_invented_members,
           "test_zz_afterwards.py::test_a_thousand_invented_members_hide_no_real_one"),
)  # fmt: skip
