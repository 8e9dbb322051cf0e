"""Members that misbehave: one joins, does its worst to the victim, and goes. The attacks one by one: tests/attacks/.

Here they are done to a node that is one of a swarm and has other troubles besides, so a few of each sort are enough.
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
    from tests.chaos.scene import Scene

DAY_S = 86400.0
REFUSED_WITHIN_S = 90.0
NUM_GROUPS = 12  # more than it takes to be banned
NUM_ANNOUNCEMENTS = 3000
NUM_STREAMS = 12
NUM_GHOSTS = 100
GHOST_LIFE_S = 60.0
MAX_TOKENS = 6  # of the swarm's completions
FOUR_GIB = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Attack:
    """A hostile member that is connected to its victim, and dice."""

    member: Member
    victim: Victim
    rng: random.Random
    note: Callable[[str], None]

    async def until_banned(self) -> None:
        """Waits for the victim to have had enough."""
        await self.victim.until(lambda: self.victim.is_banned(self.member.peer_id), within_s=REFUSED_WITHIN_S)

    def group(self) -> Group:
        """One in good form, short enough for the swarm."""
        return self.member.group(num_tokens=MAX_TOKENS)


def _wrong_logprobs(value: float, group: Group) -> Group:
    return change_completion(group, logprobs=np.full_like(group.completions[1].logprobs, value))


LIES: dict[str, Callable[[Group], Group]] = {
    "wrong rewards": lambda group: change_completion(group, reward=1.0),
    "NaN for log-probs": partial(_wrong_logprobs, float("nan")),
    "positive log-probs": partial(_wrong_logprobs, 0.5),
    "ids that no vocabulary has": lambda group: change_completion(
        group, token_ids=group.completions[1].token_ids + 2**30
    ),
    "groups of one": lambda group: group.with_completions(group.completions[:1]),
    "a run of another": lambda group: replace(group, run_id="ab" * 16),
}


async def lie(attack: Attack) -> None:
    """Good envelopes, lies inside."""
    name = attack.rng.choice(sorted(LIES))
    attack.note(name)
    await attack.member.offer(*(LIES[name](attack.group()) for _ in range(NUM_GROUPS)), within_s=REFUSED_WITHIN_S)
    await attack.until_banned()


RUBBISH: dict[str, Callable[[], bytes]] = {
    "random bytes": lambda: os.urandom(500),
    "a varint of 4 GiB": lambda: b"\x0a\xff\xff\xff\xff\x0f" + bytes(99),
}


async def hand_over_rubbish(attack: Attack) -> None:
    """Bodies that are none."""
    name = attack.rng.choice(sorted(RUBBISH))
    attack.note(name)
    claims = {one: attack.member.claim(one, RUBBISH[name]()) for one in _ids(NUM_GROUPS)}
    await attack.member.announce_until_requested(claims, within_s=REFUSED_WITHIN_S)
    await attack.until_banned()


async def announce_rubbish(attack: Attack) -> None:
    """Announcements that cannot be read."""

    async def is_banned() -> bool:
        await attack.member.gossip.announce(b"\xffrandom" + os.urandom(4))
        return await attack.victim.is_banned(attack.member.peer_id)

    await attack.victim.until(is_banned, within_s=REFUSED_WITHIN_S)


async def announce_without_end(attack: Attack) -> None:
    """Thousands of groups that are nowhere to be had."""
    attack.note(f"{NUM_ANNOUNCEMENTS} announcements")
    for one in _ids(NUM_ANNOUNCEMENTS):
        claim = attack.member.claim(one, b"", envelope_bytes=100, number=2**62)
        del attack.member.bodies[one]
        await attack.member.gossip.announce(claim)


async def hold_streams(attack: Attack) -> None:
    """Requests that begin and never end, and one with a length of 4 GiB."""

    async def hold(length: int) -> None:
        with suppress(OSError, EOFError, P2pdError):  # cut, or not opened any more: both are right
            async with attack.member.stream(RpcService.FETCH) as (reader, writer):
                writer.write(HEADER.pack(Frame.REQUEST, length))
                await reader.read()

    lengths = [FOUR_GIB, *(32 for _ in range(NUM_STREAMS))]
    async with asyncio.timeout(REFUSED_WITHIN_S):
        await asyncio.gather(*map(hold, lengths))


async def list_ghosts(attack: Attack) -> None:
    """Members in the directory that do not exist."""
    member, expires_at = attack.member, time.time() + GHOST_LIFE_S
    run_id, ghosts = member.maker.manifest.run_id, [Identity.generate() for _ in range(NUM_GHOSTS)]
    payload = pack_member(["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWNobody"], num_shards=1)
    attack.note(f"{NUM_GHOSTS} of them")
    await member.link.directory._node.store_many(
        [bucket_key(run_id, bucket_of(one.peer_id)) for one in ghosts],
        [sign_entry(one, EntryKind.MEMBER, run_id, payload, expires_at=expires_at) for one in ghosts],
        expires_at,
        subkeys=[one.peer_id for one in ghosts],
    )


def inject(scene: Scene, *, attack: Callable[[Attack], Awaitable[None]]) -> None:
    """Joins as a new member, attacks, and goes."""
    asyncio.run(_inject(scene, attack))


async def _inject(scene: Scene, attack: Callable[[Attack], Awaitable[None]]) -> None:
    model = scene.swarm.models["s"]
    maker, victim = _maker(model, scene.swarm.folder / "run.toml"), Victim(scene.node.process)
    with tempfile.TemporaryDirectory(prefix="ftis") as sockets:
        async with joined(Path(sockets) / "m", maker, victim) as member:
            await attack(Attack(member, victim, scene.rng, scene.note))


@cache
def _maker(model: Path, run: Path) -> GroupMaker:
    return GroupMaker(model, load_manifest(str(run)))


def _ids(count: int) -> Iterable[bytes]:
    return (os.urandom(32) for _ in range(count))


def _fault(name: str, promise: str, attack: Callable[[Attack], Awaitable[None]], shown_by: str) -> Fault:
    shown_by = f"tests/attacks/{shown_by}"
    hurt = partial(inject, attack=attack)
    return Fault(name=name, kind="members", promise=promise, shown_by=shown_by, inject=hurt, fits=trains)


FAULTS = (
    _fault("liar", "Groups that lie are refused by the lie's name, none is trained on, their maker is banned.", lie,
           "test_contents.py::test_a_false_claim_is_rejected_by_its_name"),
    _fault("rubbish-bodies", "What is no envelope is refused, and who hands it over is banned.", hand_over_rubbish,
           "test_bodies.py::test_a_malformed_body_is_rejected_and_its_relay_banned"),
    _fault("rubbish-announcements", "They are counted, not written down one by one; who makes them is banned.",
           announce_rubbish, "test_floods.py::test_malformed_announcements_are_counted_and_ban"),
    _fault("flood", "Announcements without end cost neither memory nor disk; others are heard meanwhile.",
           announce_without_end, "test_floods.py::test_twenty_thousand_announcements_of_nonexistent_groups_ban"),
    _fault("held-streams", "Requests that never end are cut, and others are served meanwhile.", hold_streams,
           "test_streams.py::test_streams_above_the_limit_of_a_peer_are_refused"),
    _fault("ghosts", "Members that do not exist hide nobody.", list_ghosts,
           "test_invented_members.py::test_a_thousand_invented_members_hide_no_real_one"),
)  # fmt: skip
