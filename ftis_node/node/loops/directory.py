"""The directory loop: publishes this node's record in the directory, and reads the records of peers.

consumes: own record, peers' records     produces: the peer table; catch-up requests for new members
waits for: the clock                     unblocked by: time
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ftis_node import __version__
from ftis_node.errors import RecordError
from ftis_node.node.peers.log_messages import SwarmLogMessages
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.records.envelope import PeerRecord, open_peer_record, seal_peer_record
from ftis_node.records.parsing import SCHEMA
from ftis_node.swarm.peer_guard import Place
from ftis_node.tasks import validated_domain
from ftis_node.telemetry.terminal_text import printable

if TYPE_CHECKING:
    from collections.abc import Collection

    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext, NodeDescription
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.node.protocols import Generation, Learning
    from ftis_node.node.training.own_stats import OwnStats
    from ftis_node.replay.buffer import ReplayBuffer

log = logging.getLogger(__name__)

MEMBER_LOOKUP_INTERVAL_S = 1.0
MAX_CATCHING_UP = 8
MAX_NAMED = 4  # peers in one log line
ID_TAIL = 8
RECORD_LIVES_PERIODS = 4  # a record survives this many missed renewals


class BackfillSource(Protocol):
    """Interface to the backfill loop, which gets new members and their records; a null object also implements it."""

    async def catch_up(self, peer_id: str) -> None: ...
    def note_record(self, record: PeerRecord) -> None: ...


class DirectoryLoop:
    """Loop with two periods: it checks for new members every second; every period it renews and reads records."""

    def __init__(
        self,
        *,
        context: NodeContext,
        about: NodeDescription,
        gossip: Gossip,
        learner: Learning,
        generation: Generation,
        buffer: ReplayBuffer,
        registry: PeerRegistry,
        backfill: BackfillSource,
        stats: OwnStats,
    ) -> None:
        self._context = context
        self._about = about
        self._gossip = gossip
        self._learner = learner
        self._generation = generation
        self._buffer = buffer
        self._registry = registry
        self._backfill = backfill
        self._stats = stats
        self._guard = gossip.guard
        self._members: set[str] = set()
        self._words = SwarmLogMessages()
        self._catching_up = asyncio.Semaphore(MAX_CATCHING_UP)

    async def run(self) -> None:
        """Run until canceled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_members(tasks), name="directory-members")
            tasks.create_task(self._renew_records(), name="directory-records")

    async def _watch_members(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            present = set(await self._gossip.members())
            self._log_changes(present)
            for peer_id in present - self._members:
                self._registry.seen(peer_id)
                self._context.events.write("peer_joined", peer=peer_id)
                tasks.create_task(self._catch_up(peer_id), name=f"catch-up-{peer_id[-6:]}")
            for peer_id in self._members - present:
                self._context.events.write("peer_left", peer=peer_id)
            self._members = present
            self._report_changes(present)
            self._registry.own_record = self._own_record()
            with waiting_for("the clock"):
                await asyncio.sleep(MEMBER_LOOKUP_INTERVAL_S)

    def _log_changes(self, present: set[str]) -> None:
        """Log the peers that joined or left, at most MAX_NAMED of them by name."""
        for peers, what in ((present - self._members, "joined"), (self._members - present, "left")):
            if not peers:
                continue
            names = ", ".join(sorted(map(self._name_of, peers))) if len(peers) <= MAX_NAMED else ""
            who = names or f"{len(peers)} peers"
            log.info("%s %s, %d connected", who, what, len(present), extra={"fields": {what: sorted(peers)}})

    def _name_of(self, peer_id: str) -> str:
        record = self._registry.record_of(peer_id)
        name = printable(record.name) if record is not None else ""
        return f"peer {name or '..' + peer_id[-ID_TAIL:]}"

    def _report_changes(self, members: Collection[str]) -> None:
        """Log the state of this node in the swarm when it changes."""
        gossip = self._gossip
        messages = self._words.lines(
            gossip.state,
            clock_skew_s=gossip.clock_skew_s,
            addresses=gossip.addresses,
            advice=self._registry.other_versions(members).advice,
        )
        for level, text in messages:
            log.log(level, "%s", text)

    async def _catch_up(self, peer_id: str) -> None:
        """Catch up with a few members at a time, so that a slow one delays no other."""
        async with self._catching_up:
            with self._guard.work_for(peer_id, Place.CATCH_UP):
                await self._backfill.catch_up(peer_id)

    async def _renew_records(self) -> None:
        period_s = self._context.settings.swarm.directory_period_s
        while True:
            self._stats.sample(last_number=self._buffer.last_number())
            record = seal_peer_record(self._own_record(), self._context.identity)
            if not await self._gossip.publish_record(record, ttl_s=RECORD_LIVES_PERIODS * period_s):
                log.debug("the directory did not keep this node's record; next try in %.0f s", period_s)
            await self._gossip.publish_manifest(
                self._context.manifest.canonical(), ttl_s=RECORD_LIVES_PERIODS * period_s
            )
            for peer_id in self._members:
                guarded = self._guard.work_for(peer_id, Place.RECORD)
                with waiting_for("a peer's record", endless=False), guarded:
                    await self._read_record(peer_id)
            with waiting_for("the clock"):
                await asyncio.sleep(period_s)

    async def _read_record(self, peer_id: str) -> None:
        data = await self._gossip.get_record(peer_id)
        if data is None:
            return
        try:
            record = open_peer_record(data)
        except RecordError as error:
            self._registry.note_refusal(peer_id, "record", error)
            return
        if record.peer_id == peer_id and record.run_id == self._context.manifest.run_id:
            record = replace(record, domain=validated_domain(record.domain, self._context.manifest.task))
            peer = self._registry.seen(peer_id)
            peer.record, peer.wire_schema = record, SCHEMA
            self._backfill.note_record(record)

    def _own_record(self) -> PeerRecord:
        learner, last_number = self._learner.state, self._buffer.last_number()
        return PeerRecord(
            run_id=self._context.manifest.run_id,
            peer_id=self._context.identity.peer_id,
            name=self._about.name if self._context.settings.swarm.publish_name else "",
            model=self._about.model,
            parameters=learner.parameters if learner else 0,
            tokenizer=self._about.tokenizer,
            role=self._context.settings.role,
            last_number=last_number,
            policy_version=self._generation.policy_version,
            tokens_per_s=self._generation.tokens_per_s,
            created_at=time.time(),
            software=__version__,
            read_shards=self._context.state.read_shards,
            domain=self._about.domain,
            stats=self._stats.make(last_number=last_number),
        )
