"""The directory loop: publishes this node's record in the directory, and reads the records of peers."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from ftis_node.errors import RecordError
from ftis_node.node.loops.announcement_backfill import BackfillLoop
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.own_record import OwnRecord, release_differences
from ftis_node.node.peers.swarm_log import RefusalReporter, SwarmLogLines
from ftis_node.node.supervision.waits import wait_at_most
from ftis_node.records.envelope import PeerRecord, open_peer_record, seal_peer_record
from ftis_node.swarm.peer_guard import Place
from ftis_node.tasks import validated_domain
from ftis_node.telemetry.health_summary import used_by_peers

log = logging.getLogger(__name__)
MEMBER_LOOKUP_INTERVAL_S = 1.0
MAX_OTHERS_READ = 32  # records of peers that are listed and not connected: they may refuse this node
MAX_READS_IN_FLIGHT = 8  # of records in the directory
MAX_NAMED = 4  # peers in one log line
SAID_AFTER_S = 600.0
RECORD_PERIOD_S = 30.0
RECORD_LIVES_PERIODS = 4  # a record survives this many missed renewals


@dataclass(eq=False, repr=False)
class DirectoryLoop(NodePart):
    """Loop with two periods: it checks for new members every second; every period it renews and reads records.

    `backfill` gets new members and their records. It is None in a generator node, which pulls no groups.
    """

    own_record: OwnRecord
    backfill: BackfillLoop | None
    refusals: RefusalReporter

    def __post_init__(self) -> None:
        self._members: set[str] = set()
        self._words = SwarmLogLines()
        self._is_due = asyncio.Event()  # set: renew the record now
        self.record_period_s = RECORD_PERIOD_S
        self._says_who_used_at = time.monotonic() + SAID_AFTER_S  # once, some minutes after the start

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_members(), name="directory-members")
            tasks.create_task(self._renew_records(), name="directory-records")

    def renew(self) -> None:
        """Renew the record and the entry of this node now: they expired while the machine was suspended."""
        self._is_due.set()
        self.gossip.look_again()

    async def _watch_members(self) -> None:
        while True:
            present = set(await self.gossip.members())
            self._log_changes(present)
            for peer_id in present - self._members:
                self.peers.registry.seen(peer_id)
                self.context.events.write("peer_joined", peer=peer_id)
                if self.backfill is not None:
                    self.backfill.catch_up(peer_id)
            for peer_id in self._members - present:
                self.context.events.write("peer_left", peer=peer_id)
            self._members = present
            self._report_changes(present)
            await self.refusals.update()
            self.peers.registry.own_record = self.own_record.make()
            if self._says_who_used_at <= time.monotonic():
                self._says_who_used_at = math.inf
                self._say_who_used()
            await asyncio.sleep(MEMBER_LOOKUP_INTERVAL_S)

    def _say_who_used(self) -> None:
        used = self.peers.receipts.figures(now=time.time())
        if used.recent_groups:
            log.info("%s", used_by_peers(used))
        elif self._members:
            log.info("no peer has trained on a group of this node since yesterday: `ftis-node peers` shows who refuses")

    def _log_changes(self, present: set[str]) -> None:
        for peers, what in ((present - self._members, "joined"), (self._members - present, "left")):
            if not peers:
                continue
            names = ", ".join(sorted(map(self.peers.registry.label, peers))) if len(peers) <= MAX_NAMED else ""
            who = names or f"{len(peers)} peers"
            log.info("%s %s, %d connected", who, what, len(present), extra={"fields": {what: sorted(peers)}})

    def _report_changes(self, members: Collection[str]) -> None:
        gossip = self.gossip
        messages = self._words.lines(
            gossip.state,
            clock_skew_s=gossip.clock_skew_s,
            addresses=gossip.addresses,
            advice=self.peers.registry.other_versions(members).advice,
            release=self.peers.registry.newer_release(members),
        )
        for level, text in messages:
            log.log(level, "%s", text)

    async def _renew_records(self) -> None:
        period_s = self.record_period_s
        while True:
            self.own_record.sample()
            record = seal_peer_record(self.own_record.make(), self.context.identity)
            if not await self.gossip.publish_record(record, ttl_s=RECORD_LIVES_PERIODS * period_s):
                log.debug("the directory did not keep this node's record; next try in %.0f s", period_s)
            await self.gossip.publish_manifest(self.context.manifest.canonical(), ttl_s=RECORD_LIVES_PERIODS * period_s)
            await self._read_records(limit_s=period_s)
            await wait_at_most(period_s, self._is_due)
            self._is_due.clear()

    async def _read_records(self, *, limit_s: float) -> None:
        """Read the members' records, for `limit_s` at most: this node's own one must be renewed before it expires.

        Their order is random, so those that were not read in time delay no others the next time.
        """
        in_flight = asyncio.Semaphore(MAX_READS_IN_FLIGHT)
        others = [peer for peer in await self.gossip.known_members() if peer not in self._members]

        async def read(peer_id: str) -> None:
            async with in_flight:
                with self.gossip.guard.work_for(peer_id, Place.RECORD):
                    await self._read_record(peer_id)

        present = {*self._members, *others[:MAX_OTHERS_READ]}
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                for peer_id in random.sample(sorted(present), len(present)):
                    tasks.create_task(read(peer_id), name=f"record-{peer_id[-6:]}")

    async def _read_record(self, peer_id: str) -> None:
        data = await self.gossip.get_record(peer_id)
        if data is None:
            return
        try:
            record = open_peer_record(data)
        except RecordError as error:
            self.peers.registry.note_refusal(peer_id, "record", error)
            return
        if record.peer_id == peer_id and record.run_id == self.context.manifest.run_id:
            record = replace(record, domain=validated_domain(record.domain, self.context.manifest.task))
            peer = self.peers.registry.seen(peer_id) if peer_id in self._members else self.peers.registry.entry(peer_id)
            earlier = peer.record
            peer.note_record(record)
            self._note_releases(earlier, record)
            if reason := self.peers.receipts.note_record(record, now=time.time()):
                peer.refused[reason] += 1
            if self.backfill is not None:
                self.backfill.note_record(record)

    def _note_releases(self, earlier: PeerRecord | None, record: PeerRecord) -> None:
        """Log once if a peer has other releases than this node, for a reason why groups may be refused."""
        if earlier is not None and earlier.releases == record.releases:
            return
        for text in release_differences(record, self.context.about):
            log.warning("%s %s", self.peers.registry.label(record.peer_id), text)
