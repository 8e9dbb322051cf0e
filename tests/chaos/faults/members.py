"""Malicious members: one joins, attacks the victim, and leaves. tests/attacks/ tests each attack alone.

Here the victim is part of a swarm with other faults.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.wire_format import HEADER, Frame, RpcService, bucket_key
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import bucket_of
from tests.attacks.member import Member, change_completion, joined
from tests.attacks.victim import Victim
from tests.chaos.faults.base import Fault, trains

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterable

    from ftis_node.records.group import Group
    from tests.chaos.fault_context import FaultContext

REFUSED_WITHIN_S = 90.0
NUM_GROUPS = 12  # more than a ban needs
NUM_ANNOUNCEMENTS = 3000
NUM_STREAMS = 12
NUM_INVENTED = 100
INVENTED_LIFE_S = 60.0
MAX_TOKENS = 6  # of the swarm's completions
FOUR_GIB = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Attack:
    """A malicious member that is connected to its victim, with a random generator."""

    member: Member
    victim: Victim
    rng: random.Random
    note: Callable[[str], None]

    async def until_banned(self) -> None:
        """Wait until the victim has banned the member."""
        await self.victim.until(lambda: self.victim.is_banned(self.member.peer_id), within_s=REFUSED_WITHIN_S)

    def group(self) -> Group:
        """Return a valid group, short enough for the swarm."""
        return self.member.group(num_tokens=MAX_TOKENS)


def _wrong_logprobs(value: float, group: Group) -> Group:
    return change_completion(group, logprobs=np.full_like(group.completions[1].logprobs, value))


FALSE_CLAIMS: dict[str, Callable[[Group], Group]] = {
    "wrong rewards": lambda group: change_completion(group, reward=1.0),
    "NaN for log-probs": partial(_wrong_logprobs, float("nan")),
    "positive log-probs": partial(_wrong_logprobs, 0.5),
    "ids that no vocabulary has": lambda group: change_completion(
        group, token_ids=group.completions[1].token_ids + 2**30
    ),
    "groups of one": lambda group: group.with_completions(group.completions[:1]),
    "a run of another": lambda group: replace(group, run_id="ab" * 16),
}


async def offer_false_claims(attack: Attack) -> None:
    """Offer groups with false content in valid envelopes."""
    name = attack.rng.choice(sorted(FALSE_CLAIMS))
    attack.note(name)
    await attack.member.offer(
        *(FALSE_CLAIMS[name](attack.group()) for _ in range(NUM_GROUPS)), within_s=REFUSED_WITHIN_S
    )
    await attack.until_banned()


MALFORMED_BODIES: dict[str, Callable[[], bytes]] = {
    "random bytes": lambda: os.urandom(500),
    "a varint of 4 GiB": lambda: b"\x0a\xff\xff\xff\xff\x0f" + bytes(99),
}


async def serve_malformed_bodies(attack: Attack) -> None:
    """Serve bodies that are no envelopes."""
    name = attack.rng.choice(sorted(MALFORMED_BODIES))
    attack.note(name)
    claims = {one: attack.member.claim(one, MALFORMED_BODIES[name]()) for one in _ids(NUM_GROUPS)}
    await attack.member.announce_until_requested(claims, within_s=REFUSED_WITHIN_S)
    await attack.until_banned()


async def send_malformed_announcements(attack: Attack) -> None:
    """Send announcements that cannot be parsed."""

    async def is_banned() -> bool:
        await attack.member.gossip.announce(b"\xffrandom" + os.urandom(4))
        return await attack.victim.is_banned(attack.member.peer_id)

    await attack.victim.until(is_banned, within_s=REFUSED_WITHIN_S)


async def flood_with_announcements(attack: Attack) -> None:
    """Announce thousands of groups that cannot be fetched."""
    attack.note(f"{NUM_ANNOUNCEMENTS} announcements")
    for one in _ids(NUM_ANNOUNCEMENTS):
        claim = attack.member.claim(one, b"", envelope_bytes=100, number=2**62)
        del attack.member.bodies[one]
        await attack.member.gossip.announce(claim)


async def hold_streams(attack: Attack) -> None:
    """Open requests that never end, and one with a length of 4 GiB."""

    async def hold(length: int) -> None:
        with suppress(OSError, EOFError, P2pdError):  # the victim cuts the stream or refuses it
            async with attack.member.stream(RpcService.FETCH) as (reader, writer):
                writer.write(HEADER.pack(Frame.REQUEST, length))
                await reader.read()

    lengths = [FOUR_GIB, *(32 for _ in range(NUM_STREAMS))]
    async with asyncio.timeout(REFUSED_WITHIN_S):
        await asyncio.gather(*map(hold, lengths))


async def list_invented_members(attack: Attack) -> None:
    """Store members in the directory that do not exist."""
    member, expires_at = attack.member, time.time() + INVENTED_LIFE_S
    run_id, invented = member.maker.manifest.run_id, [Identity.generate() for _ in range(NUM_INVENTED)]
    payload = pack_member(["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWNobody"], num_shards=1)
    attack.note(f"{NUM_INVENTED} members")
    await member.link.directory._node.store_many(
        [bucket_key(run_id, bucket_of(one.peer_id)) for one in invented],
        [sign_entry(one, EntryKind.MEMBER, run_id, payload, expires_at=expires_at) for one in invented],
        expires_at,
        subkeys=[one.peer_id for one in invented],
    )


def inject(context: FaultContext, *, attack: Callable[[Attack], Awaitable[None]]) -> None:
    """Join as a new member, attack, and leave."""
    asyncio.run(_inject(context, attack))


async def _inject(context: FaultContext, attack: Callable[[Attack], Awaitable[None]]) -> None:
    model = context.swarm.models["s"]
    maker, victim = _maker(model, context.swarm.folder / "run.toml"), Victim(context.node.process)
    with tempfile.TemporaryDirectory(prefix="ftis") as sockets:
        async with joined(Path(sockets) / "m", maker, victim) as member:
            await attack(Attack(member, victim, context.rng, context.note))


@cache
def _maker(model: Path, run: Path) -> GroupMaker:
    return GroupMaker(model, load_manifest(str(run)))


def _ids(count: int) -> Iterable[bytes]:
    return (os.urandom(32) for _ in range(count))


def _fault(name: str, promise: str, attack: Callable[[Attack], Awaitable[None]], shown_by: str) -> Fault:
    shown_by = f"tests/attacks/{shown_by}"
    return Fault(name, "members", promise, shown_by, partial(inject, attack=attack), fits=trains)


FAULTS = (
    _fault("false-claims", "Groups with false claims are rejected with the reason, and their sender is banned.",
           offer_false_claims,
           "test_contents.py::test_a_false_claim_is_rejected_by_its_name"),
    _fault("malformed-bodies", "Bodies that are no envelopes are rejected, and their sender is banned.",
           serve_malformed_bodies,
           "test_bodies.py::test_a_malformed_body_is_rejected_and_its_relay_banned"),
    _fault("malformed-announcements", "They are counted, not logged one by one, and their sender is banned.",
           send_malformed_announcements, "test_floods.py::test_malformed_announcements_are_counted_and_ban"),
    _fault("flood", "Many announcements cost neither memory nor disk. Others are received meanwhile.",
           flood_with_announcements, "test_floods.py::test_twenty_thousand_announcements_of_nonexistent_groups_ban"),
    _fault("open-streams", "Requests that never end are cut. Others are served meanwhile.", hold_streams,
           "test_streams.py::test_streams_above_the_limit_of_a_peer_are_refused"),
    _fault("invented-members", "Members that do not exist hide no real member.", list_invented_members,
           "test_unreal_members.py::test_a_thousand_invented_members_hide_no_real_one"),
)  # fmt: skip
