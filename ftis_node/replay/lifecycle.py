"""The life of a group in the buffer, and how a step's groups are chosen: pure parts, no database.

    WAITING --admit--> READY --take(step)--> TAKEN --release(trained)--> RELEASED
       |                 |                     `----give_back-----------> READY
       |                 `--release(stale | evicted | discarded)--------> RELEASED
       `--cancel (a slot is given back; nothing was stored)

A slot is charged before a group exists (WAITING, in memory only: nothing was acknowledged, so a crash loses nothing)
and freed after training and the hand-over of the weights, so staleness is bounded by construction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ftis_node.algorithms import choose_groups


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
    DISCARDED = "discarded"  # the run's rule passed it over


@dataclass(frozen=True, slots=True)
class Candidate:
    """A READY group as the choice sees it. `arrival` orders by admission."""

    id: bytes
    sender: str
    own: bool
    arrival: int
    created_at: float
    policy_version: int
    task: str = ""
    prompt_index: int = 0
    rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """What a rule makes of the READY groups: those of the step, and those given up unused. The rest stays READY."""

    taken: tuple[Candidate, ...]
    discarded: tuple[Candidate, ...] = ()


ChoiceRule: TypeAlias = Callable[[Sequence[Candidate], int, int], Selection]
"""Candidates, numbers of own and of foreign groups wanted; what is to become of them."""


def choose_newest(candidates: Sequence[Candidate], own: int, foreign: int) -> Selection:
    """All own groups in their order, and the newest foreign ones in turn over their senders."""
    return Selection((*choose_own(candidates, own), *choose_foreign(candidates, foreign)))


def choose_same_prompts(candidates: Sequence[Candidate], own: int, foreign: int) -> Selection:
    """For the horizontal mode: as `choose_newest`, with peers' answers to the step's own prompts before all others."""
    mine = choose_own(candidates, own)
    prompts = {(candidate.task, candidate.prompt_index) for candidate in mine}
    matching = [c for c in candidates if not c.own and (c.task, c.prompt_index) in prompts]
    chosen = choose_foreign(matching, foreign)
    others = [c for c in candidates if not c.own and (c.task, c.prompt_index) not in prompts]
    return Selection((*mine, *chosen, *choose_foreign(others, foreign - len(chosen))))


def choose_sapo(candidates: Sequence[Candidate], own: int, foreign: int, *, seed: int) -> Selection:
    """Swarm sAmpling (arXiv 2509.08721): a uniform draw among groups that teach something; all others are given up.

    What was not drawn is given up too: the next step draws from what the swarm makes until then.
    """
    ordered = sorted(candidates, key=lambda c: (c.sender, c.arrival))
    mine, theirs = [c for c in ordered if c.own], [c for c in ordered if not c.own]
    choice = choose_groups(
        [c.rewards for c in mine], [c.rewards for c in theirs], num_own=own, num_foreign=foreign, seed=seed
    )
    taken = [mine[position] for position in choice.own] + [theirs[position] for position in choice.foreign]
    ids = {candidate.id for candidate in taken}
    return Selection(tuple(taken), tuple(c for c in ordered if c.id not in ids))


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
