"""Announcements and answers -> the list of wants, gaps, duties -> questions and pulls."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.gossip import GossipMessage as Message
from ftis_node.node.loops.announcements import AssignmentMembers
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import Announcement
from ftis_node.swarm.peer_guard import Place
from tests.conftest import TOKENIZER
from tests.fuzz.mutator import Item, join
from tests.fuzz.targets import SEEDS_MADE_AT
from tests.fuzz.world import HOSTILE, OWN, world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fuzz.world import World

WHO = 0x03  # of the tag: which hostile member; 3: the node's own id
ANSWER = 0x40  # kept as an answer to whatever the node asks
DUTIES = 0x80  # the swarm counts as large: duties go round


def kinds(tag: int) -> type | None:
    """What an item holds."""
    return pb.Announcement


async def chain(items: Sequence[Item]) -> None:
    """Hears, catches up, fills gaps, pulls; twice, as the second round meets what the first has left."""
    async with world() as made:
        made.is_viewed = False
        for item in items:
            if item.tag & ANSWER:
                made.answers[HOSTILE[(item.tag & WHO) % len(HOSTILE)].peer_id].append(item.data)
        if any(item.tag & DUTIES for item in items):
            ids = [one.peer_id for one in HOSTILE]
            made.wiring.announcements.members = AssignmentMembers(ids, ids[:1])
        for _ in range(2):
            _hear(made, items)
            await _repair(made)
            async with asyncio.TaskGroup() as tasks:
                await made.pull._pull_what_is_needed(tasks)


def _hear(made: World, items: Sequence[Item]) -> None:
    peers = [*(one.peer_id for one in HOSTILE), OWN.peer_id]
    for item in items:
        if not item.tag & ANSWER:
            sender = peers[item.tag & WHO]
            with made.parts.gossip.guard.work_for(sender, Place.ANNOUNCEMENT):
                made.wiring.announcements._take(Message(sender, item.data, item.tag >> 2 & 3))


async def _repair(made: World) -> None:
    repair = made.wiring.backfill
    for member in made.members:
        repair.catch_up(member.peer_id)
    async with asyncio.TaskGroup() as tasks:
        repair._begin_queries(tasks)
    async with asyncio.TaskGroup() as tasks:
        repair._fill_gaps(tasks, [member.peer_id for member in made.members])
    for peer_id in await repair._silent_members():
        repair.catch_up(peer_id)
    async with asyncio.TaskGroup() as tasks:
        repair._begin_queries(tasks)
    repair._note_progress()


def seeds() -> list[bytes]:
    """One of each sender, a gap, an answer about somebody else."""
    base = Announcement(bytes(32), 1, 100, 5, bytes.fromhex(TOKENIZER)[:8], 3, SEEDS_MADE_AT)
    some = [replace(base, id=bytes([number]) * 32, number=number).to_bytes() for number in (1, 2, 9)]
    of_other = replace(base, id=b"\x05" * 32, sender=HOSTILE[1].peer_id, attempt=2).to_bytes()
    as_text = replace(base, id=b"\x06" * 32, tokenizer=bytes(8)).to_bytes()
    return [
        join([Item(0, one) for one in some]),
        join([Item(0, some[0]), Item(0, some[2]), Item(ANSWER, some[1]), Item(1, as_text)]),
        join([Item(DUTIES | 4, some[0]), Item(ANSWER | 2, of_other), Item(2, some[1]), Item(3, some[2])]),
        join([Item(ANSWER, some[0])] * 3),
    ]
