"""Finds groups with copied completions, decides which group is the original, and how much credit a group earns.

A group earns credit, of the points for acceptance and use, only if its rewards differ and it is the sender's first
about its problem. The credit is proportional to the surprise of its completions, up to `FULL_CREDIT_NATS`. Tokens in
runs that earlier completions have do not count. So groups without a signal, repeated problems and copied answers earn
nothing, and short noise little. A problem is identified by the hash of its messages, because many indices may have one
text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ftis_node.records.group import Group
from ftis_node.records.token_batch import TokenBatch
from ftis_node.swarm.duplicates import DuplicateDetector, FirstAnnouncements, Origin, decide, describe
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.similarity import SeenCompletion
from ftis_node.validation import Accepted

NUM_LANES = 3  # groups that intake validates concurrently
MAX_DISPLACED = 64
FULL_CREDIT_NATS = 20.0
MAX_CREDITED = 1 << 14  # groups


@dataclass(eq=False, repr=False)
class CopyCatalog:
    """Catalog of the completions of accepted groups, and of the credit that their senders earn for new ones.

    `clock` returns Unix seconds. `is_new` returns whether a peer has sent no good group yet. `charge` charges a sender
    for seconds of CPU time, because the search blocks the event loop.
    """

    own_id: str
    clock: Callable[[], float]
    is_new: Callable[[str], bool]
    charge: Callable[[str, float], None]

    def __post_init__(self) -> None:
        self._duplicates = DuplicateDetector(self.own_id)
        self._described: deque[tuple[TokenBatch, list[SeenCompletion]]] = deque(maxlen=NUM_LANES)
        self._announced = FirstAnnouncements()
        self._displaced = LruDict[bytes, Origin](MAX_DISPLACED)  # by original: the copy that arrived before it
        self._credits = LruDict[bytes, float](MAX_CREDITED)  # in [0, 1], by group
        self._credited = LruDict[tuple[str, bytes], None](MAX_CREDITED)  # (sender, problem) with credit

    def note_announced(self, group_id: bytes, *, announcer: str) -> None:
        """Note a first announcement, which shows that its group existed then."""
        self._announced.note(group_id, announcer=announcer, at=self.clock())

    def credit_of(self, group_id: bytes) -> float:
        """Return the credit of a group; 0 for an unknown one, as after a restart."""
        return self._credits.get(group_id, 0.0)

    def remember(self, accepted: Accepted) -> Origin | None:
        """Add an accepted group. Return the origin of the group that is its copy."""
        group, group_id = accepted.group, accepted.envelope.id
        problem, completions = group.problem_hash, self._seen_completions(group)
        copy = self._displaced.pop(group_id, None)
        if copy is not None:
            self._duplicates.forget(copy.group_id, problem)
            self._credits[copy.group_id] = 0.0  # a step that uses it now earns its sender nothing
        is_foreign = group.sender != self.own_id
        if is_foreign and len(set(group.rewards)) > 1 and (group.sender, problem) not in self._credited:
            with self._charged(group.sender):
                nats = self._duplicates.new_nats(problem, completions)
            if nats > 0:
                self._credited[group.sender, problem] = None
            self._credits[group_id] = min(1.0, nats / FULL_CREDIT_NATS)
        self._duplicates.remember(self._origin(group, group_id), problem, completions)
        return copy

    def duplicate_reason(self, group: Group, group_id: bytes) -> str | None:
        """Return the reason to refuse a group with copied completions; None if they are new, or it is the original."""
        if group.sampling.top_k:  # equal completions may be certain, whatever their log-probs
            return None
        with self._charged(group.sender):
            copy = self._duplicates.find(group.sender, group.problem_hash, self._seen_completions(group))
        if copy is None:
            return None
        again = self._origin(group, group_id)
        kind = decide(copy, again, own_id=self.own_id, is_known=lambda peer_id: not self.is_new(peer_id))
        if kind is None:
            self._displaced[group_id] = copy.first
        return kind

    @contextmanager
    def _charged(self, sender: str) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.charge(sender, time.thread_time() - began)

    def _origin(self, group: Group, group_id: bytes) -> Origin:
        return Origin(group.sender, group_id, self._announced.at(group_id))

    def _seen_completions(self, group: Group) -> list[SeenCompletion]:
        """Return the completions in the form of the catalog, made once for a group in intake."""
        for tokens, seen in self._described:
            if tokens is group.tokens:
                return seen
        seen = describe(group)
        self._described.append((group.tokens, seen))
        return seen
