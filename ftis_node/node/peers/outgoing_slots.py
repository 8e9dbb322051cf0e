"""Slots of requests to peers: they limit the requests in flight, in total and per peer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum

from ftis_node.backoff import BackoffTable, doubling
from ftis_node.gossip import FetchOutcome
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import PeerGuard
from ftis_node.swarm.rate_limits import PeerSlots

FAILED_REST_S = 5.0
MAX_PEERS = 4096  # with a known pace
QUICK_S = 1.0  # time limit of a query to a peer that is not known to be slow
SLOW_S = 5.0  # to a slow one
ANSWERED = (FetchOutcome.COMPLETE, FetchOutcome.BUSY)


@dataclass(kw_only=True, eq=False, repr=False)
class PullSlots:
    """Slots of pulls: `num_slots` for all peers. `backoff` pauses peers whose pulls failed. For one event loop."""

    num_slots: int
    guard: PeerGuard
    peers: PeerManager

    def __post_init__(self) -> None:
        self._slots = PeerSlots()
        self._changed = asyncio.Event()
        self.backoff = BackoffTable[str](doubling(FAILED_REST_S))

    @property
    def num_in_use(self) -> int:
        return self._slots.num_held()

    async def wait(self) -> None:
        while self.num_in_use >= self.num_slots:  # each pull has a time limit
            self._changed.clear()
            await self._changed.wait()

    def take(self, peer_id: str) -> str:
        """Take a slot for a peer for which `may_ask` is true, and return its kind for `release`."""
        kind, *limits = self._limits_of(peer_id)
        self._slots.take(peer_id, kind, *limits)
        return kind

    def release(self, peer_id: str, kind: str) -> None:
        self._slots.release(peer_id, kind)
        self._changed.set()

    def is_able(self, peer_id: str) -> bool:
        """Return whether to pull from a peer now: neither banned nor in a pause after a failure."""
        may_work = self.guard.may_work(peer_id) and not self.peers.is_banned(peer_id)
        return may_work and self.backoff.is_due(peer_id, now=time.monotonic())

    def may_ask(self, peer_id: str) -> bool:
        """Return whether one more pull from a peer may start."""
        return self.is_able(peer_id) and self._slots.has_free(peer_id, *self._limits_of(peer_id))

    def _limits_of(self, peer_id: str) -> tuple[str, int, int]:
        """Return a peer's kind, the most slots of that kind, and of each of its peers, so that none delays the others.

        All peers whose last pull failed share one slot. Each peer that has sent no group yet has one slot, and all
        of them together leave one slot free.
        """
        if self.backoff.has_failed(peer_id):
            return "failed", 1, 1
        if self.peers.registry.has_sent_groups(peer_id):
            return "proven", self.num_slots, max(1, self.num_slots // 2)
        return "new", max(1, self.num_slots - 1), 1


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
        self._slots = PeerSlots()
        self._paces = LruDict[str, Pace](MAX_PEERS)

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._slots

    def pace_of(self, peer_id: str) -> Pace:
        """Return the peer's pace at its last query."""
        return self._paces.get(peer_id, Pace.UNKNOWN)

    def take(self, peer_id: str) -> bool:
        """Take a slot of the peer's pace, and return True; return False if none is free or the peer has one."""
        return self._slots.take(peer_id, self.pace_of(peer_id), self._num_slots)

    def limit_s(self, peer_id: str) -> float:
        return SLOW_S if self._is_in_slow_slot(peer_id) else QUICK_S

    def note(self, peer_id: str, *, took_s: float, is_answered: bool) -> None:
        self._paces.pop(peer_id, None)
        if took_s >= QUICK_S or is_answered:  # a request that fails at once does not show the pace
            self._paces[peer_id] = Pace.SLOW if took_s >= QUICK_S else Pace.QUICK

    def turned_slow(self, peer_id: str) -> bool:
        """Return whether a query in the peer's slot showed that the peer is slow: then repeat it in another slot."""
        return self.pace_of(peer_id) is Pace.SLOW and not self._is_in_slow_slot(peer_id)

    def release(self, peer_id: str) -> None:
        self._slots.release(peer_id)

    def _is_in_slow_slot(self, peer_id: str) -> bool:
        return self._slots.num_held(peer_id, kind=Pace.SLOW) > 0
