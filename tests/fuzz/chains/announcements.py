"""Announcements, answers, bodies -> pull queue, gaps, assignments -> questions and pulls -> groups."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ftis_node.gossip import GossipMessage as Message
from ftis_node.node.peers.announcements import AssignmentMembers
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import Announcement, announce_group, seal_group
from ftis_node.swarm.peer_guard import Place
from tests.conftest import TOKENIZER, make_group
from tests.fuzz.fuzzed_node import HOSTILE, MADE_AT, OWN, RUN, FuzzedNode, fuzzed_node, running
from tests.fuzz.mutator import Item, join

MEMBER_BITS = 0x03  # bits of the tag: the hostile member; 3: the node's own id
BODY = 0x20  # an envelope in the answer to each request for groups
ANSWER = 0x40  # an answer to each question of the node
IS_LARGE_SWARM = 0x80  # the node is in a large swarm, which assigns groups to members


def kinds(tag: int) -> type | None:
    return pb.Envelope if tag & BODY and not tag & ANSWER else pb.Announcement


async def chain(items: Sequence[Item]) -> None:
    """Receive, catch up, fill gaps and pull, twice, so that the second round has the state of the first."""
    async with fuzzed_node() as fuzzed:
        fuzzed.renders_all_views = False
        for item in items:
            peer_id = HOSTILE[(item.tag & MEMBER_BITS) % len(HOSTILE)].peer_id
            if item.tag & ANSWER:
                fuzzed.answers[peer_id].append(item.data)
            elif item.tag & BODY:
                fuzzed.bodies[peer_id].append(item.data)
        if any(item.tag & IS_LARGE_SWARM for item in items):
            ids = [one.peer_id for one in HOSTILE]
            fuzzed.wiring.announcements.members = AssignmentMembers(ids, ids[:1])
        async with running(fuzzed.intake.run()):
            for _ in range(2):
                _receive(fuzzed, items)
                await _backfill(fuzzed)
                async with asyncio.TaskGroup() as tasks:
                    await fuzzed.pull._pull_what_is_needed(tasks)


def _receive(fuzzed: FuzzedNode, items: Sequence[Item]) -> None:
    peers = [*(one.peer_id for one in HOSTILE), OWN.peer_id]
    for item in items:
        if not item.tag & (ANSWER | BODY):
            sender = peers[item.tag & MEMBER_BITS]
            with fuzzed.parts.gossip.guard.work_for(sender, Place.ANNOUNCEMENT):
                fuzzed.wiring.announcements._take(Message(sender, item.data, item.tag >> 2 & 3))


async def _backfill(fuzzed: FuzzedNode) -> None:
    backfill = fuzzed.wiring.backfill
    for member in fuzzed.members:
        backfill.catch_up(member.peer_id)
    async with asyncio.TaskGroup() as tasks:
        backfill._begin_queries(tasks)
    async with asyncio.TaskGroup() as tasks:
        backfill._fill_gaps(tasks, [member.peer_id for member in fuzzed.members])
    for peer_id in await backfill._silent_members():
        backfill.catch_up(peer_id)
    async with asyncio.TaskGroup() as tasks:
        backfill._begin_queries(tasks)


def seeds() -> list[bytes]:
    """Return announcements of each sender, a gap, an answer about another sender, and groups with their bodies."""
    base = Announcement(bytes(32), 1, 100, 5, bytes.fromhex(TOKENIZER)[:8], 3, MADE_AT)
    some = [replace(base, id=bytes([number]) * 32, number=number).to_bytes() for number in (1, 2, 9)]
    of_other = replace(base, id=b"\x05" * 32, sender=HOSTILE[1].peer_id, attempt=2).to_bytes()
    as_text = replace(base, id=b"\x06" * 32, tokenizer=bytes(8)).to_bytes()
    groups = [make_group(HOSTILE[0], run_id=RUN.run_id, number=number, created_at=MADE_AT) for number in (1, 2)]
    envelopes = [seal_group(group, HOSTILE[0]) for group in groups]
    bodies = [Item(BODY, envelope.to_bytes()) for envelope in envelopes]
    claims = [
        announce_group(envelope, group, envelope_bytes=len(body.data)).to_bytes()
        for envelope, group, body in zip(envelopes, groups, bodies, strict=True)
    ]
    return [
        join([*(Item(0, claim) for claim in claims), *bodies]),
        join([*(Item(at, claim) for at, claim in enumerate(claims)), *bodies[::-1], *bodies]),
        join([Item(0, one) for one in some]),
        join([Item(0, some[0]), Item(0, some[2]), Item(ANSWER, some[1]), Item(1, as_text)]),
        join([Item(IS_LARGE_SWARM | 4, some[0]), Item(ANSWER | 2, of_other), Item(2, some[1]), Item(3, some[2])]),
        join([Item(ANSWER, some[0])] * 3),
    ]
