"""Queue of announced groups with their holders, which decides what to request next.

    announced --add--> WAITING --next_request--> IN FLIGHT --arrived--> (removed)
                          ^                          |
                          `--------- missed ---------'   while another peer may hold the group

The newest groups come first. Peers take turns, so that no sender fills a learner's batch alone. A group is requested
from one peer at a time: first its sender, then other peers that announced it, then members that the caller names. At
most `MAX_TRIES` peers get a request for a group. A peer is asked by its own announcement, if it made one. The form,
sender, size and age in it are claims, and a false one affects no other peer. A group that a peer did not announce comes
after those that it announced, and is dropped first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

MAX_HOLDERS = 4
MAX_TRIES = 4


@dataclass(frozen=True, slots=True)
class PullItem:
    """A group as one peer announced it. `is_own`: that peer announced it as its own group.

    `is_announced`: the peer to request it from announced it; otherwise the values are the claims of another peer.
    `is_repair`: the first announcement was missed. `is_assigned`: this node is assigned to pull it. `num_retries`
    counts how often no peer had it.
    """

    id: bytes
    sender: str
    number: int
    num_bytes: int
    created_at: float
    as_text: bool = False
    is_own: bool = False
    is_announced: bool = True
    is_repair: bool = False
    is_assigned: bool = False
    num_retries: int = 0


class PullSource(NamedTuple):
    peer_id: str
    as_text: bool


class PullRequest(NamedTuple):
    source: PullSource
    items: tuple[PullItem, ...]


@dataclass(slots=True)
class _Known:
    """The holder to ask next, its item, the items of other holders, and the peers already tried."""

    item: PullItem
    holder: str
    spare: dict[str, PullItem] = field(default_factory=dict)
    tried: frozenset[str] = frozenset()


class PullQueue:
    """Bounded pull queue with one sub-queue for each source.

    A source with more than `max_per_holder` items loses its oldest. Above `capacity` items the largest sources lose
    their oldest. Items that their holder did not announce are dropped first, assigned items last.
    """

    def __init__(self, *, max_per_holder: int = 1024, capacity: int = 8192) -> None:
        self._max_per_holder = max_per_holder
        self._capacity = capacity
        self._waiting: dict[PullSource, dict[bytes, _Known]] = {}  # in the order of the sources' next turn
        self._in_flight: dict[bytes, _Known] = {}
        self._by_id: dict[bytes, _Known] = {}
        self._assigned: dict[bytes, None] = {}  # ids of assigned items, waiting or in flight

    def __contains__(self, group_id: bytes) -> bool:
        return group_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, item: PullItem, *, holder: str) -> bool:
        """Add a group that `holder` announced, or a further holder of a known one; return whether it is new."""
        known = self._by_id.get(item.id)
        if item.is_assigned:
            self._assigned[item.id] = None
        if known is None:
            self._put(_Known(item, holder))
            waiting = self._waiting[PullSource(holder, item.as_text)]
            if len(waiting) > self._max_per_holder:
                self._pass_on(min(waiting.values(), key=lambda one: one.item.is_announced))
            if len(self._by_id) > self._capacity:
                self._evict()
            return True
        if holder == known.holder and not known.item.is_announced:
            known.item = replace(item, as_text=known.item.as_text, is_assigned=known.item.is_assigned)
        if holder != known.holder and holder not in known.tried and len(known.spare) < MAX_HOLDERS:
            known.spare.setdefault(holder, item)
        if item.is_assigned and not known.item.is_assigned:
            known.item = replace(known.item, is_assigned=True)
        return False

    def next_request(
        self,
        *,
        most: int,
        need: int | None,
        max_bytes: int,
        most_of: Callable[[str], int] | None = None,
        may_ask: Callable[[str], bool] = lambda _: True,
    ) -> PullRequest | None:
        """Return the next request of at most `most` groups and `max_bytes` announced bytes; None if none is due.

        `most_of` returns a lower limit on the groups for one peer. `need` is the number of groups that the learner
        lacks beside the assigned ones; None: all.
        """
        for source in list(self._waiting) if need != 0 else self._sources_of_assigned():
            if not may_ask(source.peer_id):
                continue
            limit = most if most_of is None else min(most, most_of(source.peer_id))
            share = limit if need is None else -(-need // len(self._waiting))  # sources take turns
            waiting = self._waiting[source].values()
            meant = [k for k in waiting if k.item.is_assigned or need != 0]
            chosen = self._choose(meant, most=limit, num_others=min(limit, share), max_bytes=max_bytes)
            if chosen:
                return self._send_off(source, chosen)
        return None

    def _sources_of_assigned(self) -> list[PullSource]:
        """Return the sources with assigned items alone, because thousands of other items may wait."""
        known = [self._by_id[one] for one in self._assigned if one not in self._in_flight]
        return list(dict.fromkeys(PullSource(one.holder, one.item.as_text) for one in known))

    def arrived(self, ids: Iterable[bytes]) -> None:
        """Remove groups that arrived or were refused.

        A text shows only its signer's word for the id of its group, so the other holders of that id stay.
        """
        for group_id in ids:
            known = self._by_id.get(group_id)
            if known is not None and known.item.as_text:
                self._pass_on(known)
            else:
                self._drop(group_id)

    def missed(
        self,
        request: PullRequest,
        *,
        missing: Iterable[bytes],
        others: Sequence[str] = (),
        can_serve: Callable[[str, bytes], bool] = lambda *_: True,
    ) -> list[PullItem]:
        """Requeue the groups of `request` that did not arrive, each for its next holder; return those dropped.

        `others` are members to try if no further holder is known. `can_serve` returns whether a peer may get the
        request for a group.
        """
        given_up = []
        for group_id in missing:
            known = self._in_flight.pop(group_id, None)
            if known is None:
                continue
            known.tried |= {request.source.peer_id}
            known.spare = {peer: item for peer, item in known.spare.items() if can_serve(peer, group_id)}
            left = [*known.spare]
            if not known.item.as_text:  # only its sender has the text form
                left += [peer for peer in others if peer not in known.tried and can_serve(peer, group_id)]
            if not left or len(known.tried) >= MAX_TRIES:
                self._drop(group_id)
                given_up.append(known.item)
            else:
                self._ask_next(known, left[0])
        return given_up

    def put_back(self, request: PullRequest) -> None:
        """Requeue all items of a request that the peer answered with BUSY."""
        for item in request.items:
            if (known := self._in_flight.pop(item.id, None)) is not None:
                self._put(known)

    def drop_older(self, created_before: float) -> None:
        """Drop waiting items created before this time, by the words of their holders."""
        for known in [known for source in self._waiting.values() for known in source.values()]:
            if known.item.created_at < created_before:
                self._pass_on(known)

    def reroute(self, may_ask: Callable[[str], bool]) -> None:
        """Move items of sources that `may_ask` excludes to another holder.

        So no peer can withhold a group if it announces the group first and does not serve it.
        """
        paused = [source for source in self._waiting if not may_ask(source.peer_id)]
        for known in [known for source in paused for known in self._waiting[source].values() if known.spare]:
            able = next((peer for peer in known.spare if may_ask(peer)), None)
            if able is not None:
                was = {known.holder: known.item}
                self._take_out(known)
                self._ask_next(known, able)
                known.spare = was | known.spare

    @staticmethod
    def _choose(waiting: Sequence[_Known], *, most: int, num_others: int, max_bytes: int) -> list[_Known]:
        """Return announced items first, among them the assigned ones, then the newest; the first item always fits."""
        chosen: list[_Known] = []
        for known in sorted(waiting, key=_rank)[::-1]:
            if not known.item.is_assigned:
                if num_others <= 0:
                    continue
                num_others -= 1
            max_bytes -= known.item.num_bytes
            if len(chosen) == most or (chosen and max_bytes < 0):
                break
            chosen.append(known)
        return chosen

    def _send_off(self, source: PullSource, chosen: Sequence[_Known]) -> PullRequest:
        waiting = self._waiting.pop(source)
        for known in chosen:
            del waiting[known.item.id]
            self._in_flight[known.item.id] = known
        if waiting:
            self._waiting[source] = waiting  # moves to the end
        return PullRequest(source, tuple(known.item for known in chosen))

    def _put(self, known: _Known) -> None:
        source = PullSource(known.holder, known.item.as_text)
        waiting = self._waiting.setdefault(source, {})
        waiting[known.item.id] = known
        self._by_id[known.item.id] = known

    def _ask_next(self, known: _Known, holder: str) -> None:
        """Queue a group that is in no source for another holder; one that did not announce it promised nothing."""
        was = known.item
        item = known.spare.pop(holder, None) or replace(was, is_own=False, is_announced=False)
        known.holder, known.item = holder, replace(item, is_assigned=was.is_assigned, num_retries=was.num_retries)
        self._put(known)

    def _pass_on(self, known: _Known) -> None:
        """Queue a group for its next holder instead; drop it if there is none."""
        self._in_flight.pop(known.item.id, None)
        if known.spare:
            self._take_out(known)
            self._ask_next(known, next(iter(known.spare)))
        else:
            self._drop(known.item.id)

    def _drop(self, group_id: bytes) -> None:
        known = self._by_id.pop(group_id, None)
        self._in_flight.pop(group_id, None)
        self._assigned.pop(group_id, None)
        if known is not None:
            self._take_out(known)

    def _take_out(self, known: _Known) -> None:
        source = PullSource(known.holder, known.item.as_text)
        waiting = self._waiting.get(source, {})
        waiting.pop(known.item.id, None)
        if not waiting:
            self._waiting.pop(source, None)

    def _evict(self) -> None:
        """Drop an eighth of the capacity at once, to amortize the cost: half of the largest source, repeatedly."""
        left = max(1, self._capacity // 8)
        waiting_items = [known for source in self._waiting.values() for known in source.values()]
        unannounced = [known.item.id for known in waiting_items if not known.item.is_announced][:left]
        for group_id in unannounced:
            self._drop(group_id)
        left -= len(unannounced)
        queue = [(-_num_others(waiting), source) for source, waiting in self._waiting.items()]
        heapq.heapify(queue)
        while queue and left:
            _, source = heapq.heappop(queue)
            oldest = sorted(self._waiting[source].values(), key=lambda known: known.item.is_assigned)
            evicted = oldest[: min(left, -(-len(oldest) // 2))]
            left -= len(evicted)
            for known in evicted:
                self._drop(known.item.id)
            if waiting := self._waiting.get(source):
                heapq.heappush(queue, (-_num_others(waiting), source))


def _rank(known: _Known) -> tuple[bool, bool, float]:
    return known.item.is_announced, known.item.is_assigned, known.item.created_at


def _num_others(waiting: dict[bytes, _Known]) -> int:
    return sum(not known.item.is_assigned for known in waiting.values())
