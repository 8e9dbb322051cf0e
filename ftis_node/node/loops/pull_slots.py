"""Slots of the pull and backfill loops: they limit the requests in flight, in total and per peer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from ftis_node.gossip import FetchOutcome
from ftis_node.node.peers.manager import PeerManager
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import MAX_PEERS, PeerBackoff, PeerGuard

FAILED_REST_S = 5.0
QUICK_S = 1.0  # time limit of a query to a peer that is not known to be slow
SLOW_S = 5.0  # to a slow one
ANSWERED = (FetchOutcome.COMPLETE, FetchOutcome.BUSY)


class HeldBytes:
    """Semaphore of `capacity_bytes`. A larger reservation waits until it is the only one. For one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def of(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve `num_bytes` while the block runs."""
        while self.held_bytes and self.held_bytes + num_bytes > self._capacity_bytes:
            self._changed.clear()
            await self._changed.wait()
        self.held_bytes += num_bytes
        try:
            yield
        finally:
            self.held_bytes -= num_bytes
            self._changed.set()


@dataclass(kw_only=True, eq=False, repr=False)
class PullSlots:
    """Concurrency limiter with `num_slots` slots for all peers. `backoff` pauses peers whose pulls failed."""

    num_slots: int
    guard: PeerGuard
    peers: PeerManager

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.num_slots)
        self._asking: Counter[str] = Counter()  # pulls in flight, by peer
        self.backoff = PeerBackoff(first_s=FAILED_REST_S)

    @property
    def num_in_use(self) -> int:
        return self._asking.total()

    async def acquire(self) -> None:
        """Wait for a free slot and take it; `assign` or `release` must follow."""
        with waiting_for("a pull under way to end"):  # each pull has a time limit
            await self._free.acquire()

    def assign(self, peer_id: str) -> None:
        """Count the acquired slot for a peer."""
        self._asking[peer_id] += 1

    def release(self, peer_id: str | None = None) -> None:
        """Free a slot. `peer_id` is the peer to which it was assigned, None if to none."""
        self._free.release()
        if peer_id is not None:
            self._asking -= Counter([peer_id])  # Counter subtraction removes entries of 0

    def is_able(self, peer_id: str) -> bool:
        """Return whether to pull from a peer now: neither banned nor in a pause after a failure."""
        may_work = self.guard.may_work(peer_id) and not self.peers.is_banned(peer_id)
        return may_work and self.backoff.may_ask(peer_id, now=time.monotonic())

    def may_ask(self, peer_id: str) -> bool:
        """Return whether one more pull from a peer may start.

        All peers whose last pull failed share one slot. Each peer that has sent no group yet has one slot, and all
        of them together leave one slot free. So slow or absent peers do not delay others.
        """
        return self.is_able(peer_id) and self._has_slot_for(peer_id)

    def _has_slot_for(self, peer_id: str) -> bool:
        if self.backoff.has_failed(peer_id):
            return not any(map(self.backoff.has_failed, self._asking))
        if self.peers.registry.has_sent_groups(peer_id):
            return self._asking[peer_id] < max(1, self.num_slots // 2)
        num_unproven = sum(not self.peers.registry.has_sent_groups(peer) for peer in self._asking)
        return not self._asking[peer_id] and num_unproven < max(1, self.num_slots - 1)


class Pace(StrEnum):
    """How long a peer needs to answer a query."""

    UNKNOWN = "unknown"
    QUICK = "quick"
    SLOW = "slow"


class QuerySlots:
    """Concurrency limiter for queries, with `num_slots` slots for peers of each pace. For one event loop.

    A peer is slow if its last query took `QUICK_S` or longer. A query to a peer that is not known to be slow ends after
    that time. The caller then repeats it in a slot for slow peers. So slow and absent peers delay only one another, and
    a new peer delays others by that time at most. A peer has at most one slot.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: dict[str, Pace] = {}
        self._paces = LruDict[str, Pace](MAX_PEERS)

    def __contains__(self, peer_id: str) -> bool:
        """Return whether the peer has a slot."""
        return peer_id in self._held

    def pace_of(self, peer_id: str) -> Pace:
        """Return the peer's pace at its last query."""
        return self._paces.get(peer_id, Pace.UNKNOWN)

    def take(self, peer_id: str) -> bool:
        """Take a slot of the peer's pace, and return True; return False if none is free or the peer has one."""
        pace = self.pace_of(peer_id)
        if peer_id in self._held or sum(one is pace for one in self._held.values()) >= self._num_slots:
            return False
        self._held[peer_id] = pace
        return True

    def limit_s(self, peer_id: str) -> float:
        """Return the time limit in seconds of a query in the peer's slot."""
        return SLOW_S if self._held[peer_id] is Pace.SLOW else QUICK_S

    def note(self, peer_id: str, *, took_s: float, is_answered: bool) -> None:
        """Note the duration of a query."""
        self._paces.pop(peer_id, None)
        if took_s >= QUICK_S or is_answered:  # a request that fails at once does not show the pace
            self._paces[peer_id] = Pace.SLOW if took_s >= QUICK_S else Pace.QUICK

    def turned_slow(self, peer_id: str) -> bool:
        """Return whether a query in the peer's slot showed that the peer is slow: then repeat it in another slot."""
        return self._held[peer_id] is not Pace.SLOW and self.pace_of(peer_id) is Pace.SLOW

    def release(self, peer_id: str) -> None:
        del self._held[peer_id]
