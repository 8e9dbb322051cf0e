"""Directory records -> the peer table, domains, missing tails -> questions, portions, status, the dashboard's words."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import PeerRecord, open_peer_record, seal_peer_record
from ftis_node.records.identity import PEER_DOMAIN
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.pull_queue import PullItem
from tests.conftest import TOKENIZER
from tests.fuzz.mutator import Item, join
from tests.fuzz.targets import SEEDS_MADE_AT
from tests.fuzz.world import FAR, HOSTILE, MIXED_RUN, NEAR, OWN, world

if TYPE_CHECKING:
    from collections.abc import Sequence

WHO = 0x03
HEARD = 0x04  # its announcements were heard before
AS_IS = 0x80  # the bytes as they are, not signed here


def kinds(tag: int) -> type | None:
    """What an item holds."""
    return pb.PeerRecord if tag & AS_IS else pb.PeerInfo


async def chain(items: Sequence[Item]) -> None:
    """Reads each record as the directory loop does; then asks, portions and shows."""
    async with world(MIXED_RUN, domain=NEAR) as made:
        loop = made.wiring.directory_loop
        for item in items:
            identity = HOSTILE[(item.tag & WHO) % len(HOSTILE)]
            if item.tag & HEARD:
                made.wiring.announcements.tracker_of(identity.peer_id).note(5, at=time.monotonic())
            record = item.data if item.tag & AS_IS else _signed(identity, item.data)
            made.swarm.put_record(identity.peer_id, record, run_id=MIXED_RUN.run_id, ttl_s=60.0)
            with made.parts.gossip.guard.work_for(identity.peer_id, Place.RECORD):
                await loop._read_record(identity.peer_id)
        loop._report_changes([one.peer_id for one in HOSTILE])
        async with asyncio.TaskGroup() as tasks:
            made.wiring.backfill._fill_gaps(tasks, [one.peer_id for one in HOSTILE])
        for one in HOSTILE:
            made.pull._is_near(PullItem(bytes(32), one.peer_id, 1, 100, SEEDS_MADE_AT))
            made.wiring.announcements._pulls(one.peer_id)
        made.pull._portions(4)
        open_peer_record(seal_peer_record(loop._own_record(), OWN))


def _signed(identity: Any, data: bytes) -> bytes:
    """The record that `identity` signs; whatever it says, it says of itself."""
    info = pb.PeerInfo()
    try:
        info.ParseFromString(data)
    except DecodeError:
        return data
    info.peer = identity.peer
    told = info.SerializeToString()
    return pb.PeerRecord(body=told, signature=identity.sign(PEER_DOMAIN, told)).SerializeToString()


def seeds() -> list[bytes]:
    """Records of a full node, a generator, one of a domain."""
    records = [
        PeerRecord(
            MIXED_RUN.run_id, one.peer_id, "n", "m", 1, TOKENIZER, role, 9, 1, 1.0, SEEDS_MADE_AT, "1", domain=domain
        )
        for one, role, domain in zip(HOSTILE, ("full", "generator", "full"), ("", NEAR, FAR), strict=True)
    ]
    sealed = [seal_peer_record(record, one) for record, one in zip(records, HOSTILE, strict=True)]
    told = [pb.PeerRecord.FromString(one).body for one in sealed]
    return [
        join([Item(HEARD, told[0]), Item(1, told[1]), Item(2, told[2])]),
        join([Item(AS_IS, sealed[0]), Item(HEARD | 2, told[2])]),
        join([Item(HEARD, told[2])]),
    ]
