"""Limits on groups about one problem: a sender's places in the buffer and in a step. Pure functions.

Own groups are exempt. Several senders may have groups about one problem. Without these limits a peer could train its
neighbors on one problem. It could also double the weight of an answer with a copy that is too likely to be detected.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.replay.lifecycle import Candidate

MAX_PER_PROBLEM = 2  # READY groups of one sender about one problem; a step uses one of them


def one_per_problem(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the newest group of each sender and problem, in the given order."""
    newest: dict[tuple[str, tuple[str, int]], Candidate] = {}
    for candidate in candidates:
        key = candidate.sender, candidate.problem
        newest[key] = max(newest.get(key, candidate), candidate, key=by_age)
    return [c for c in candidates if newest[c.sender, c.problem] is c]


def take_turns(queues: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Merge the queues, one group of each in turn."""
    return [candidate for turn in zip_longest(*queues) for candidate in turn if candidate is not None]


def take_turns_by_problem(queues: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Merge the queues, one group of each in turn; further groups about a problem come after all other problems."""
    waiting = [deque(queue) for queue in queues]
    repeated: list[list[Candidate]] = [[] for _ in queues]
    ordered: dict[tuple[str, int], Candidate] = {}
    while any(waiting):
        for queue, others in zip(waiting, repeated, strict=True):
            while queue and queue[0].problem in ordered:
                others.append(queue.popleft())
            if queue:
                candidate = queue.popleft()
                ordered[candidate.problem] = candidate
    return [*ordered.values(), *take_turns(repeated)]


def by_age(candidate: Candidate) -> tuple[float, int]:
    return candidate.created_at, candidate.arrival


def beyond_problems(held: list[Candidate]) -> list[Candidate]:
    """Remove and return the groups beyond `MAX_PER_PROBLEM`; the newest come first in `held`."""
    counts, removed = Counter[tuple[str, tuple[str, int]]](), []
    for candidate in list(held):
        key = candidate.sender, candidate.problem
        counts[key] += 1
        if counts[key] > MAX_PER_PROBLEM:
            held.remove(candidate)
            removed.append(candidate)
    return removed
