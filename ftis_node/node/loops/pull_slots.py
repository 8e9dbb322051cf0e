"""Slots of the pull and backfill loops: they limit the requests in flight, in total and per peer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from ftis_node.gossip import FetchOutcome
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.swarm.peer_guard import MAX_PEERS, PeerBackoff, Place

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ftis_node.gossip import Fetched
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.swarm.peer_guard import PeerGuard

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
    registry: PeerRegistry

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
        is_able = False
        with self.guard.work_for(peer_id, Place.PULL):
            may_work = self.guard.may_work(peer_id) and not self.peers.is_banned(peer_id)
            is_able = may_work and self.backoff.may_ask(peer_id, now=time.monotonic())
        return is_able

    def may_ask(self, peer_id: str) -> bool:
        """Return whether one more pull from a peer may start.

        All peers whose last pull failed share one slot. Each peer that has sent no group yet has one slot, and all
        of them together leave one slot free. So slow or absent peers do not delay others.
        """
        may_ask = False
        with self.guard.work_for(peer_id, Place.PULL):
            may_ask = self.is_able(peer_id) and self._has_slot_for(peer_id)
        return may_ask

    def _has_slot_for(self, peer_id: str) -> bool:
        if self.backoff.has_failed(peer_id):
            return not any(map(self.backoff.has_failed, self._asking))
        if self.registry.has_sent_groups(peer_id):
            return self._asking[peer_id] < max(1, self.num_slots // 2)
        num_unproven = sum(not self.registry.has_sent_groups(peer) for peer in self._asking)
        return not self._asking[peer_id] and num_unproven < max(1, self.num_slots - 1)


class Pace(StrEnum):
    """How long a peer needs to answer a query."""

    UNKNOWN = "unknown"
    QUICK = "quick"
    SLOW = "slow"


class SendQuery(Protocol):
    """Function that sends a query and returns the answer, after `timeout_s` seconds at most."""

    async def __call__(self, *, timeout_s: float) -> Fetched: ...


class QuerySlots:
    """Concurrency limiter for queries, with `num_slots` slots for peers of each pace. For one event loop.

    A peer is slow if its last query took `QUICK_S` or longer. A query to a peer that is not known to be slow ends after
    that time. So slow and absent peers delay only one another, and a new peer delays others by that time at most.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = {pace: asyncio.Semaphore(num_slots) for pace in Pace}
        self._paces: dict[str, Pace] = {}  # by time of the last query, oldest first

    def pace_of(self, peer_id: str) -> Pace:
        """Return the peer's pace at its last query."""
        return self._paces.get(peer_id, Pace.UNKNOWN)

    @staticmethod
    def limit_s(pace: Pace) -> float:
        """Return the time limit in seconds of a query to a peer of this pace."""
        return SLOW_S if pace is Pace.SLOW else QUICK_S

    def takes_turn(self, busy: dict[str, Pace], peer_id: str) -> bool:
        """Add a peer to the `busy` ones; return False if it is one, or if there are `num_slots` of its pace."""
        pace = self.pace_of(peer_id)
        if peer_id in busy or sum(one is pace for one in busy.values()) >= self._num_slots:
            return False
        busy[peer_id] = pace
        return True

    @asynccontextmanager
    async def of(self, peer_id: str) -> AsyncIterator[float]:
        """Hold a slot while the block runs. Yield the time limit of the query in seconds."""
        pace = self.pace_of(peer_id)
        with waiting_for("a query under way to end"):  # each query has a time limit
            await self._free[pace].acquire()
        try:
            yield self.limit_s(pace)
        finally:
            self._free[pace].release()

    async def query(self, peer_id: str, send: SendQuery) -> Fetched:
        """Send a query in a slot of the peer's pace; if it shows that the peer is slow, once more in a slow slot."""
        while True:
            pace = self.pace_of(peer_id)
            async with self.of(peer_id) as limit_s:
                began_at = time.monotonic()
                with waiting_for("a peer's answer", endless=False):
                    fetched = await send(timeout_s=limit_s)
            is_answered = fetched.outcome in ANSWERED
            now = self.note(peer_id, took_s=time.monotonic() - began_at, is_answered=is_answered)
            if is_answered or pace is Pace.SLOW or now is not Pace.SLOW:
                return fetched

    def note(self, peer_id: str, *, took_s: float, is_answered: bool) -> Pace:
        """Note the duration of a query, and return the peer's pace from now on."""
        self._paces.pop(peer_id, None)
        if took_s >= QUICK_S or is_answered:  # a request that fails at once does not show the pace
            self._paces[peer_id] = Pace.SLOW if took_s >= QUICK_S else Pace.QUICK
        if len(self._paces) > MAX_PEERS:
            del self._paces[next(iter(self._paces))]
        return self.pace_of(peer_id)
