"""Handles announcements: queues groups to pull, and tracks each sender's sequence numbers to find lost groups.

A peer's statements about other peers are not trusted. An announcement of another peer's group is only a hint about a
holder. Sequence numbers count only if their sender announces them itself.

Any peer can publish an old announcement again, with its author's signature. So a repeated or stale one does not count
in its author's rate limit, and a flood costs no reputation. Before the limit a node only hashes and parses 512 bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ftis_node.errors import RecordError
from ftis_node.gossip import GossipMessage as Message
from ftis_node.node.peers.node_part import NodePart
from ftis_node.records.envelope import Announcement, open_announcement
from ftis_node.records.parsing import SCHEMA
from ftis_node.swarm.demand import eligible_members, is_assigned
from ftis_node.swarm.lru import IdsByPeer, LruDict
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.pull_queue import PullItem, PullQueue
from ftis_node.swarm.rate_limits import GROUPS_PER_MINUTE, minute_buckets
from ftis_node.swarm.sequence import SequenceTracker
from ftis_node.validation.rules import MAX_CLOCK_SKEW_S

MAX_SENDERS = 4096  # senders with a tracker; beyond that, drop the least recently used
MAX_REFUSED = 4096
MAX_TO_CONFIRM = 1 << 14  # groups of peers to confirm to them
MAX_TAKEN = 16_384  # announcements; 4 MiB


class AssignmentMembers(NamedTuple):
    """Known members of the run, and the members of this node's own shard; both without this node."""

    known: Collection[str]
    of_own_shard: Collection[str]


@dataclass(eq=False, repr=False)
class AnnouncementHandler(NodePart):
    """Turns announcements into entries of the pull queue. `changed` is set when the queue has a new entry."""

    def __post_init__(self) -> None:
        self._reset_at = self.store.reader.reset_at() + MAX_CLOCK_SKEW_S
        self._trackers = LruDict[str, SequenceTracker](MAX_SENDERS)
        self.queue = PullQueue()
        self._refused = LruDict[bytes, None](MAX_REFUSED)  # not to be pulled again
        self._refused_of = LruDict[tuple[str, bytes], None](MAX_REFUSED)  # (peer, group): not to be requested from it
        self._malformed = LruDict[tuple[str, bytes], None](MAX_REFUSED)  # (peer, hash of a payload): charged once
        self._taken = LruDict[bytes, None](MAX_TAKEN)  # hashes of usable announcements with their authors
        self._limiter = minute_buckets(GROUPS_PER_MINUTE)
        self.changed = asyncio.Event()
        self.to_confirm = IdsByPeer(capacity=MAX_TO_CONFIRM)
        self.has_to_confirm = asyncio.Event()
        self.announcements_by_shard: Counter[int] = Counter()
        self.members: AssignmentMembers | None = None  # None: no groups are assigned, since the node pulls all or none

    async def listen(self) -> None:
        async for message in self.gossip.announcements():
            self.announcements_by_shard[message.shard] += 1
            with self.gossip.guard.work_for(message.sender, Place.ANNOUNCEMENT):
                self._take(message)

    def _take(self, message: Message) -> None:
        sender = message.sender
        if self.peers.is_banned(sender):
            self.peers.refuse(sender, "announcement_banned", unused="banned")
            return
        key = hashlib.sha256(sender.encode() + message.payload).digest()
        if key in self._taken:
            return
        usable = self.handle(sender, message.payload)
        if usable:
            self._taken[key] = None
        for one in usable:
            if one.sender is None:
                self.tracker_of(sender).note(one.number, at=time.monotonic())
                if one.attempt and self._is_stored(one.id, sender, one.number):  # the first confirmation was lost
                    self.to_confirm.add(sender, one.id)
                    self.has_to_confirm.set()

    def _is_rate_allowed(self, peer_id: str) -> bool:
        if self.peers.is_trusted(peer_id) or self._limiter.of(peer_id).take(1.0, now=time.monotonic()):
            return True
        self.peers.refuse(peer_id, "announcement_flood", unused="announcement_flood")
        return False

    def refuse(self, ids: Iterable[bytes | None]) -> None:
        """Note groups that validation refused permanently: the node does not pull them again."""
        self._refused.update((group_id, None) for group_id in ids if group_id is not None)

    def refuse_of(self, peer_id: str, ids: Iterable[bytes]) -> None:
        """Note groups for which this peer sent a wrong envelope: request them only from other peers.

        So the peer is charged once per group, even if it announces the group again.
        """
        self._refused_of.update(((peer_id, group_id), None) for group_id in ids)

    def can_serve(self, peer_id: str, group_id: bytes) -> bool:
        """Return whether to request a group from a peer: False if it sent a wrong envelope for that group."""
        return (peer_id, group_id) not in self._refused_of

    def senders(self) -> list[str]:
        """Return the peers whose sequence numbers this node tracks."""
        return list(self._trackers)

    def tracker_of(self, sender: str) -> SequenceTracker:
        """Return the tracker of a sender's sequence numbers; create it if there is none."""
        return self._trackers.touched(sender, lambda: SequenceTracker(at=time.monotonic()))

    def handle(self, announcer: str, payload: bytes, *, is_repair: bool = False) -> list[Announcement]:
        """Queue the announced groups that the node has to pull. Return the usable ones.

        Each group counts in the rate limit, except in an answer to a request.
        """
        try:
            first = open_announcement(payload, since=self.oldest_usable)
        except RecordError as error:
            if error.reason != "stale":
                self._refuse_announcement(announcer, payload, error)
            return []
        self.peers.registry.seen(announcer).wire_schema = SCHEMA
        usable = []
        for one in (first, *first.more):
            if not is_repair and not self._is_rate_allowed(announcer):
                break
            usable.append(self._consider(announcer, one, is_repair=is_repair))
        return [one for one in usable if one is not None]

    def _consider(self, announcer: str, announcement: Announcement, *, is_repair: bool) -> Announcement | None:
        """Queue an announced group if the node has to pull it. Return the announcement; None if it is not usable."""
        if announcement.created_at > time.time() + MAX_CLOCK_SKEW_S:
            self.peers.refuse(announcer, "announcement_clock_skew", unused="clock_skew")
            return None
        if announcement.sender == announcer:
            announcement = replace(announcement, sender=None)
        sender = announcement.sender or announcer
        as_text = announcement.tokenizer != self.context.about.tokenizer_prefix
        if sender == self.context.peer_id:
            return None
        if why_unusable := self._why_unusable(announcement, as_text=as_text):
            is_first = not is_repair and not announcement.attempt  # once for each group
            if why_unusable != "stale" and is_first and sender == announcer:  # others' words about a sender are hints
                self.peers.note_unused(sender, why_unusable)
            return None
        if sender != announcer and self.peers.is_banned(sender):
            return None
        if not is_repair and not announcement.attempt:
            self.peers.copies.note_announced(announcement.id, announcer=announcer)
        item = PullItem(
            id=announcement.id,
            sender=sender,
            number=announcement.number,
            num_bytes=announcement.envelope_bytes,
            created_at=min(announcement.created_at, time.time()),  # a sender's fast clock must give no advantage
            as_text=as_text,
            is_own=sender == announcer,
            is_repair=is_repair,
            is_assigned=self._is_assigned(announcement, sender),
        )
        is_to_be_had = (not as_text or sender == announcer) and self.can_serve(announcer, item.id)
        if is_to_be_had and not self.has(item) and self.queue.add(item, holder=announcer):
            self.changed.set()
        return announcement

    def _refuse_announcement(self, announcer: str, payload: bytes, error: RecordError) -> None:
        key = announcer, hashlib.sha256(payload).digest()
        is_repeated = key in self._malformed
        self._malformed[key] = None
        self.peers.note_unused(announcer, error.reason)
        self.peers.refuse_message(announcer, "announcement", error, is_charged=not is_repeated)

    @property
    def oldest_usable(self) -> float:
        """Return the oldest usable creation time (Unix seconds), by the age limit and the last reset of the buffer."""
        return max(time.time() - self.context.manifest.step.max_age_s, self._reset_at)

    def _why_unusable(self, announcement: Announcement, *, as_text: bool) -> str:
        """Return the reason for which the node does not pull an announced group; "" if it may."""
        manifest = self.context.manifest
        if announcement.created_at <= self.oldest_usable:
            return "stale"
        if as_text and manifest.step.other_tokenizers == "ignore":
            return "tokenizer"
        return "size" if announcement.envelope_bytes > manifest.wire.max_envelope_bytes else ""

    def has(self, item: PullItem) -> bool:
        """Return whether this node has or had a group, or refused it.

        A group received as text has a different id, and the buffer keeps no ids of pruned groups. For both it keeps
        the sequence number.
        """
        return item.id in self._refused or self._is_stored(item.id, item.sender, item.number)

    def _is_stored(self, group_id: bytes, sender: str, number: int) -> bool:
        return self.store.reader.is_known(group_id) or self.store.reader.has_number(sender, number)

    def _is_assigned(self, announcement: Announcement, sender: str) -> bool:
        if self.members is None:
            return False
        own_id = self.context.peer_id
        members = eligible_members(
            sender,
            peer_id=own_id,
            known=self.members.known,
            shard_members=self.members.of_own_shard,
            num_shards=self.context.manifest.wire.announcement_shards,
        )
        return members is not None and is_assigned(
            announcement.id, own_id, members, sender=sender, attempt=announcement.attempt, is_eligible=self._pulls
        )

    def _pulls(self, peer_id: str) -> bool:
        """Return whether a peer pulls groups and is not banned. A generator does not pull; an unknown role does."""
        if self.peers.is_banned(peer_id):
            return False
        record = self.peers.registry.record_of(peer_id)
        return record is None or record.role != "generator"
