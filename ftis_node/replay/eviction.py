"""Eviction of foreign groups from a full buffer, and the age limits of groups. Pure functions without a database."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.replay.group_choice import Candidate, newest_by
from ftis_node.swarm.rate_limits import ShareCap

MAX_PER_PROBLEM = 2  # READY groups of one sender about one problem; a step uses one of them


def choose_evicted(
    candidates: Sequence[Candidate], *, keep: int, cap: ShareCap, keep_bytes: int | None = None
) -> list[Candidate]:
    """Return the foreign groups to evict, so that at most `keep` groups and `keep_bytes` of envelopes stay.

    A sender keeps `MAX_PER_PROBLEM` groups about one problem. No neighbor may hold more groups than `cap` allows.
    Beyond the total, the neighbor with the most groups or bytes loses its oldest group first. So a peer that sends more
    than others evicts its own groups.
    """
    by_neighbor = newest_by(candidates, cap.neighbor)
    evicted: list[Candidate] = []
    for held in by_neighbor.values():
        evicted += _beyond_problems(held)
    for name, held in by_neighbor.items():
        places = cap.places(name, num_neighbors=len(by_neighbor), capacity=keep)
        evicted += held[places:]
        del held[places:]
    excess = sum(map(len, by_neighbor.values())) - keep
    evicted += [max(by_neighbor.values(), key=len).pop() for _ in range(excess)]
    return evicted + _beyond_bytes(by_neighbor, keep_bytes)


def _beyond_bytes(by_neighbor: dict[str, list[Candidate]], keep_bytes: int | None) -> list[Candidate]:
    sizes = {name: sum(candidate.num_bytes for candidate in held) for name, held in by_neighbor.items()}
    total, evicted = sum(sizes.values()), []
    while keep_bytes is not None and total > keep_bytes:
        name = max(sizes, key=sizes.__getitem__)
        evicted.append(by_neighbor[name].pop())
        sizes[name] -= evicted[-1].num_bytes
        total -= evicted[-1].num_bytes
    return evicted


def _beyond_problems(held: list[Candidate]) -> list[Candidate]:
    counts, removed = Counter[tuple[str, bytes]](), []
    for candidate in list(held):
        key = candidate.sender, candidate.problem
        counts[key] += 1
        if counts[key] > MAX_PER_PROBLEM:
            held.remove(candidate)
            removed.append(candidate)
    return removed


@dataclass(frozen=True, slots=True)
class Freshness:
    """Age limits. Times are Unix seconds; versions count weight updates of this node, whose id is `peer_id`.

    Own groups are also too old if their time is more than `max_ahead_s` after `now`, because the clock was set back.
    """

    now: float
    max_age_s: float
    policy_version: int
    max_version_lag: int
    peer_id: str | None = None
    max_ahead_s: float = math.inf

    def is_stale(self, candidate: Candidate) -> bool:
        """Return whether a group is too old; only versions of this node's own weights are comparable."""
        if self.now - candidate.created_at > self.max_age_s:
            return True
        if candidate.own and candidate.created_at - self.now > self.max_ahead_s:
            return True
        by_our_weights = candidate.own or (candidate.weights_of is not None and candidate.weights_of == self.peer_id)
        return by_our_weights and self.policy_version - candidate.policy_version > self.max_version_lag
