"""The life of a group in the buffer, and how a step's groups are chosen: pure parts, no database.

    WAITING --admit--> READY --take(step)--> TAKEN --release(trained)--> RELEASED
       |                 |                     `----give_back-----------> READY
       |                 `--release(stale | evicted)--------------------> RELEASED
       `--cancel (a slot is given back; nothing was stored)

A slot is charged before a group exists (WAITING, in memory only: nothing was acknowledged, so a crash loses nothing)
and freed after training and the hand-over of the weights, so staleness is bounded by construction.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class State(StrEnum):
    """Where a stored group stands."""

    READY = "ready"
    TAKEN = "taken"
    RELEASED = "released"


class ReleaseReason(StrEnum):
    """Why a group left the buffer."""

    TRAINED = "trained"  # a step used it
    STALE = "stale"  # too old, or sampled too many versions ago
    EVICTED = "evicted"  # newer groups needed its place
    REFUSED = "refused"  # the learner refused the step it was in


@dataclass(frozen=True, slots=True)
class Candidate:
    """A READY group as the choice sees it. `arrival` orders by admission."""

    id: bytes
    sender: str
    own: bool
    arrival: int
    created_at: float
    policy_version: int


def choose_own(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The `count` own groups that wait longest: every own group is used while it is fresh."""
    return sorted((c for c in candidates if c.own), key=lambda c: c.arrival)[:count]


def choose_foreign(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """`count` foreign groups, spread over senders, the newest of each first.

    Senders take turns; a sender with more groups than others gets more only when the others have run out.
    """
    by_sender: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda c: (c.created_at, c.arrival)):
        if not candidate.own:
            by_sender[candidate.sender].append(candidate)
    chosen: list[Candidate] = []
    while by_sender and len(chosen) < count:
        for sender in sorted(by_sender):
            if len(chosen) == count:
                break
            chosen.append(by_sender[sender].pop())
            if not by_sender[sender]:
                del by_sender[sender]
    return chosen


@dataclass(frozen=True, slots=True)
class Freshness:
    """What is too old. Times are Unix seconds; versions count weight updates of this node."""

    now: float
    max_age_s: float
    policy_version: int
    max_version_lag: int

    def is_stale(self, candidate: Candidate) -> bool:
        """Whether a group has aged out; only own groups' versions can be compared with ours."""
        if self.now - candidate.created_at > self.max_age_s:
            return True
        return candidate.own and self.policy_version - candidate.policy_version > self.max_version_lag
