"""What was announced and is wanted, who has it, and what to ask for next.

    announced --add--> WANTED --next_batch--> IN FLIGHT --arrived--> (gone)
                         ^                        |
                         `-------- missed --------'   while somebody is left who may have it

The newest come first, and the peers that have them take turns, so that no sender fills a learner's batch while others
wait. A group is asked of one peer at a time: of its sender, then of others who were heard to hold it, then of members
at random (the caller names them), a few in all.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

MAX_HOLDERS = 4
MAX_TRIES = 4


@dataclass(frozen=True, slots=True)
class PullItem:
    """An announced group. `is_repair`: it was missed at first. `is_duty`: this node is the one to pull it."""

    id: bytes
    sender: str
    number: int
    num_bytes: int
    created_at: float
    as_text: bool = False
    is_repair: bool = False
    is_assigned: bool = False


class Source(NamedTuple):
    """Where groups are to be had, and in which form."""

    peer_id: str
    as_text: bool


class PullRequest(NamedTuple):
    """What to ask of a peer in one request."""

    source: Source
    items: tuple[PullItem, ...]


@dataclass(slots=True)
class _Known:
    """A want, who may be asked for it, and who was."""

    want: PullItem
    holder: str
    spare: tuple[str, ...] = ()
    asked: frozenset[str] = frozenset()


class PullQueue:
    """Bounded: of a peer with too many wanted groups the oldest are forgotten; of too many in all, those of whoever has
    most.

    Duties are the last to be forgotten. Where nothing but duties is asked for, only their sources are looked at: in a
    large swarm that happens for each announcement, while thousands of other groups wait.
    """

    def __init__(self, *, max_per_holder: int = 1024, capacity: int = 8192) -> None:
        self._max_per_holder = max_per_holder
        self._capacity = capacity
        self._waiting: dict[Source, dict[bytes, _Known]] = {}  # sources in the order of their next turn
        self._num_duties: dict[Source, int] = {}  # of what is waiting; sources without any are left out
        self._in_flight: dict[bytes, _Known] = {}
        self._by_id: dict[bytes, _Known] = {}

    def __contains__(self, group_id: bytes) -> bool:
        return group_id in self._by_id

    def __len__(self) -> int:
        """Wanted, and in flight."""
        return len(self._by_id)

    @property
    def num_in_flight(self) -> int:
        """Asked for, and not here yet."""
        return len(self._in_flight)

    @property
    def num_missed(self) -> int:
        """Wanted, or asked for, because they were missed at first."""
        return sum(known.want.is_repair for known in self._by_id.values())

    def add(self, want: PullItem, *, holder: str) -> bool:
        """A group that `holder` says it has; whether it is news. A holder more of a known one is remembered."""
        known = self._by_id.get(want.id)
        if known is None:
            self._put(_Known(want, holder))
            if len(self._by_id) > self._capacity:
                self._forget_some()
            return True
        is_other = holder != known.holder and holder not in known.spare and holder not in known.asked
        if is_other and not want.as_text and len(known.spare) < MAX_HOLDERS:
            known.spare = (*known.spare, holder)
        if want.is_assigned and not known.want.is_assigned:
            known.want = replace(known.want, is_assigned=True)
            if want.id not in self._in_flight:
                self._count_duty(Source(known.holder, known.want.as_text), 1)
        return False

    def num_in_flight_of(self, is_meant: Callable[[PullItem], bool]) -> int:
        """Those of them that are meant."""
        return sum(is_meant(known.want) for known in self._in_flight.values())

    def next_request(
        self,
        *,
        most: int,
        need: int | None,
        max_bytes: int,
        may_ask: Callable[[str], bool] = lambda _: True,
        is_meant: Callable[[PullItem], bool] = lambda _: True,
    ) -> PullRequest | None:
        """The next request: `most` groups, `max_bytes` announced bytes at most. None where nothing is to be asked.

        `need`: how many groups the learner lacks beside those that are this node's duty; None: all that there are.
        Beside duties only those that are meant.
        """
        for source in list(self._num_duties if need == 0 else self._waiting):
            if not may_ask(source.peer_id):
                continue
            share = most if need is None else -(-need // len(self._waiting))  # senders take turns
            meant = [k for k in self._waiting[source].values() if k.want.is_assigned or is_meant(k.want)]
            chosen = self._choose(meant, most=most, num_others=min(most, share), max_bytes=max_bytes)
            if chosen:
                return self._send_off(source, chosen)
        return None

    def arrived(self, ids: Iterable[bytes]) -> None:
        """These are here, or were refused: nothing more is to be asked for."""
        for group_id in ids:
            self._drop(group_id)

    def missed(
        self,
        batch: PullRequest,
        *,
        missing: Iterable[bytes],
        others: Sequence[str] = (),
        may_give: Callable[[str, bytes], bool] = lambda *_: True,
    ) -> list[PullItem]:
        """`batch` ended without these; they are asked of the next who may have them. Returns those given up.

        `others`: members who may be tried where nobody else is known to have them. `may_give`: whether a peer may be
        asked for a group.
        """
        given_up = []
        for group_id in missing:
            known = self._in_flight.pop(group_id, None)
            if known is None:
                continue
            known.asked |= {batch.source.peer_id}
            left = [peer for peer in (*known.spare, *others) if peer not in known.asked and may_give(peer, group_id)]
            if not left or len(known.asked) >= MAX_TRIES or known.want.as_text:  # only its sender tells it as text
                del self._by_id[group_id]
                given_up.append(known.want)
                continue
            known.holder = left[0]
            known.spare = tuple(peer for peer in known.spare if peer != known.holder)
            self._put(known)
        return given_up

    def put_back(self, batch: PullRequest) -> None:
        """The peer was busy: the same again, later."""
        for want in batch.items:
            if (known := self._in_flight.pop(want.id, None)) is not None:
                self._put(known)

    def drop_older(self, created_before: float) -> int:
        """Forgets what is waiting and has grown too old; returns how many."""
        old = [
            known.want.id
            for waiting in self._waiting.values()
            for known in waiting.values()
            if known.want.created_at < created_before
        ]
        self.arrived(old)
        return len(old)

    def reroute(self, may_ask: Callable[[str], bool]) -> None:
        """What waits for a peer that may not be asked now is asked of another who was heard to hold it.

        So nobody can keep a group from us by announcing it first and then giving nothing.
        """
        paused = [source for source in self._waiting if not may_ask(source.peer_id)]
        for known in [known for source in paused for known in self._waiting[source].values() if known.spare]:
            able = next((peer for peer in known.spare if may_ask(peer)), None)
            if able is not None:
                was = known.holder
                self._take_out(known)
                known.holder, known.spare = able, (was, *(peer for peer in known.spare if peer != able))
                self._put(known)

    def drop_senders(self, senders: Collection[str]) -> None:
        """Forgets what these peers made, and what only they hold."""
        for known in list(self._by_id.values()):
            if known.want.sender in senders or known.holder in senders:
                self._drop(known.want.id)

    @staticmethod
    def _choose(waiting: Sequence[_Known], *, most: int, num_others: int, max_bytes: int) -> list[_Known]:
        """Duties first, then the newest others; the first one always fits."""
        newest_first = sorted(waiting, key=lambda known: (known.want.is_assigned, known.want.created_at))[::-1]
        chosen: list[_Known] = []
        for known in newest_first:
            if not known.want.is_assigned:
                if num_others <= 0:
                    break
                num_others -= 1
            max_bytes -= known.want.num_bytes
            if len(chosen) == most or (chosen and max_bytes < 0):
                break
            chosen.append(known)
        return chosen

    def _send_off(self, source: Source, chosen: Sequence[_Known]) -> PullRequest:
        waiting = self._waiting.pop(source)
        for known in chosen:
            del waiting[known.want.id]
            self._in_flight[known.want.id] = known
            self._count_duty(source, -known.want.is_assigned)
        if waiting:
            self._waiting[source] = waiting  # at the end of the queue
        return PullRequest(source, tuple(known.want for known in chosen))

    def _put(self, known: _Known) -> None:
        source = Source(known.holder, known.want.as_text)
        waiting = self._waiting.setdefault(source, {})
        waiting[known.want.id] = known
        self._by_id[known.want.id] = known
        self._count_duty(source, known.want.is_assigned)
        if len(waiting) > self._max_per_holder:
            self._drop(next(iter(waiting)))

    def _drop(self, group_id: bytes) -> None:
        known = self._by_id.pop(group_id, None)
        self._in_flight.pop(group_id, None)
        if known is not None:
            self._take_out(known)

    def _take_out(self, known: _Known) -> None:
        source = Source(known.holder, known.want.as_text)
        waiting = self._waiting.get(source, {})
        if waiting.pop(known.want.id, None) is not None:
            self._count_duty(source, -known.want.is_assigned)
        if not waiting:
            self._waiting.pop(source, None)

    def _forget_some(self) -> None:
        """An eighth of all, so that it need not be done for each: half of whoever has most, again and again."""
        left = max(1, self._capacity // 8)
        queue = [(self._num_duties.get(source, 0) - len(waiting), source) for source, waiting in self._waiting.items()]
        heapq.heapify(queue)  # those with most that is no duty first
        while queue and left:
            _, source = heapq.heappop(queue)
            oldest = sorted(self._waiting[source].values(), key=lambda known: known.want.is_assigned)
            doomed = oldest[: min(left, -(-len(oldest) // 2))]
            left -= len(doomed)
            for known in doomed:
                self._drop(known.want.id)
            if waiting := self._waiting.get(source):
                heapq.heappush(queue, (self._num_duties.get(source, 0) - len(waiting), source))

    def _count_duty(self, source: Source, change: int) -> None:
        if not change:
            return
        self._num_duties[source] = self._num_duties.get(source, 0) + change
        if not self._num_duties[source]:
            del self._num_duties[source]
