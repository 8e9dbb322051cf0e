"""Directory records -> peer table, domains, missing numbers -> questions, status, dashboard."""

import asyncio
import time
from collections.abc import Sequence

from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import PeerRecord, open_peer_record, seal_peer_record
from ftis_node.swarm.peer_guard import Place
from tests.conftest import TOKENIZER
from tests.fuzz.fuzzed_node import FAR, HOSTILE, MADE_AT, MIXED_RUN, NEAR, OWN, fuzzed_node
from tests.fuzz.mutator import Item, join, parsed
from tests.records.wire_example import sign_peer_info

MEMBER_BITS = 0x03
IS_KNOWN = 0x04  # the node has received announcements of this member
AS_IS = 0x80  # raw bytes instead of a body to sign


def kinds(tag: int) -> type | None:
    return pb.PeerRecord if tag & AS_IS else pb.PeerInfo


async def chain(items: Sequence[Item]) -> None:
    async with fuzzed_node(MIXED_RUN, domain=NEAR) as fuzzed:
        loop = fuzzed.wiring.directory_loop
        for item in items:
            identity = HOSTILE[(item.tag & MEMBER_BITS) % len(HOSTILE)]
            if item.tag & IS_KNOWN:
                fuzzed.wiring.announcements.tracker_of(identity.peer_id).note(5, at=time.monotonic())
            info = parsed(pb.PeerInfo, item.data)
            info.peer = identity.peer
            record = item.data if item.tag & AS_IS else sign_peer_info(info.SerializeToString(), identity)
            fuzzed.swarm.put_record(identity.peer_id, record, run_id=MIXED_RUN.run_id, ttl_s=60.0)
            with fuzzed.parts.gossip.guard.work_for(identity.peer_id, Place.RECORD):
                await loop._read_record(identity.peer_id)
        loop._report_changes([one.peer_id for one in HOSTILE])
        async with asyncio.TaskGroup() as tasks:
            fuzzed.wiring.backfill._fill_gaps(tasks, [one.peer_id for one in HOSTILE])
        for one in HOSTILE:
            fuzzed.wiring.announcements._pulls(one.peer_id)
        open_peer_record(seal_peer_record(loop.own_record.make(), OWN))


def seeds() -> list[bytes]:
    records = [
        PeerRecord(MIXED_RUN.run_id, one.peer_id, "n", "m", 1, TOKENIZER, role, 9, 1, 1.0, MADE_AT, "1", domain=domain)
        for one, role, domain in zip(HOSTILE, ("full", "generator", "full"), ("", NEAR, FAR), strict=True)
    ]
    sealed = [seal_peer_record(record, one) for record, one in zip(records, HOSTILE, strict=True)]
    bodies = [pb.PeerRecord.FromString(one).body for one in sealed]
    return [
        join([Item(IS_KNOWN, bodies[0]), Item(1, bodies[1]), Item(2, bodies[2])]),
        join([Item(AS_IS, sealed[0]), Item(IS_KNOWN | 2, bodies[2])]),
        join([Item(IS_KNOWN, bodies[2])]),
    ]
