"""The life of a group in the buffer, and how a step's groups are chosen: pure parts, no database.

    WAITING --admit--> READY --take(step)--> TAKEN --release(trained)--> RELEASED
       |                 |                     `----give_back-----------> READY
       |                 `--release(stale | evicted | discarded | poisoned | damaged | delivered | audit)-> RELEASED
       `--cancel (a slot is given back; nothing was stored)

A slot is charged before a group exists and freed after training and the hand-over of the weights. So staleness is
bounded by construction. WAITING is in memory only: no group was acknowledged, so a crash loses nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from ftis_node.algorithms import choose_groups, has_signal, split_foreign, usefulness

if TYPE_CHECKING:
    from ftis_node.swarm.pulling.domains import OwnDomain
    from ftis_node.swarm.reputation.rate_limits import ShareCap


class State(StrEnum):
    """State of a stored group."""

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
    POISONED = "poisoned"  # the learner failed in several steps that had it
    AUDIT = "audit"  # its log-probs are not those of the weights that it claims
    DAMAGED = "damaged"  # it is not what was stored: a disk lost or turned bytes
    DELIVERED = "delivered"  # a peer has it, and nobody trains on it here


@dataclass(frozen=True, slots=True)
class Candidate:
    """A READY group as the choice sees it. `arrival` orders by admission; `weights_of` as in its header.

    `num_bytes` is its envelope's size.
    """

    id: bytes
    sender: str
    own: bool
    arrival: int
    created_at: float
    policy_version: int
    task: str = ""
    prompt_index: int = 0
    rewards: tuple[float, ...] = ()
    weights_of: str | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """What a rule makes of the READY groups: those of the step, and those given up unused. The rest stays READY."""

    taken: tuple[Candidate, ...]
    discarded: tuple[Candidate, ...] = ()


ChoiceRule: TypeAlias = Callable[[Sequence[Candidate], int, int], Selection]
"""Candidates, numbers of own and of foreign groups wanted; what is to become of them."""


def choose_newest(
    candidates: Sequence[Candidate],
    own: int,
    foreign: int,
    *,
    neighbour: Callable[[str], str] = str,
    domain: OwnDomain | None = None,
    turn: int = 0,
) -> Selection:
    """All own groups in their order, and the newest foreign ones in turn over their senders.

    `domain`: whose groups are preferred as its share says, over the steps that `turn` counts.
    """
    theirs = [c for c in candidates if not c.own]
    sides = _split(theirs, foreign, domain=domain, turn=turn)
    chosen = [c for side, num in sides for c in choose_foreign(side, num, neighbour=neighbour)]
    return Selection((*choose_own(candidates, own), *chosen))


def _split(
    theirs: list[Candidate], count: int, *, domain: OwnDomain | None, turn: int
) -> list[tuple[list[Candidate], int]]:
    """Foreign groups of the own domain and of others, with how many to take of each; without a domain all in one."""
    if domain is None:
        return [(theirs, count)]
    near, far = ([c for c in theirs if (c.task in domain.tasks) is is_near] for is_near in (True, False))
    num_near, num_far = split_foreign(count, num_near=len(near), num_far=len(far), share=domain.share, turn=turn)
    return [(near, num_near), (far, num_far)]


def choose_same_prompts(
    candidates: Sequence[Candidate], own: int, foreign: int, *, neighbour: Callable[[str], str] = str
) -> Selection:
    """For the horizontal mode: as `choose_newest`, with peers' answers to the step's own prompts before all others."""
    mine = choose_own(candidates, own)
    prompts = {(candidate.task, candidate.prompt_index) for candidate in mine}
    matching = [c for c in candidates if not c.own and (c.task, c.prompt_index) in prompts]
    chosen = choose_foreign(matching, foreign, neighbour=neighbour)
    others = [c for c in candidates if not c.own and (c.task, c.prompt_index) not in prompts]
    rest = choose_foreign(others, foreign - len(chosen), neighbour=neighbour)
    return Selection((*mine, *chosen, *rest))


def choose_sapo(
    candidates: Sequence[Candidate], own: int, foreign: int, *, seed: int, domain: OwnDomain | None = None
) -> Selection:
    """Swarm sAmpling (arXiv 2509.08721): a uniform draw among groups that teach something; all others are given up.

    What was not drawn is given up too: the next step draws from what the swarm makes until then.
    """
    ordered = sorted(candidates, key=lambda c: (c.sender, c.arrival))
    mine, theirs = [c for c in ordered if c.own], [c for c in ordered if not c.own]
    choice = choose_groups(
        [c.rewards for c in mine],
        [c.rewards for c in theirs],
        num_own=own,
        num_foreign=foreign,
        seed=seed,
        is_near=None if domain is None else [c.task in domain.tasks for c in theirs],
        near_share=0.0 if domain is None else domain.share,
    )
    taken = [mine[position] for position in choice.own] + [theirs[position] for position in choice.foreign]
    ids = {candidate.id for candidate in taken}
    return Selection(tuple(taken), tuple(c for c in ordered if c.id not in ids))


def choose_useful(
    candidates: Sequence[Candidate],
    own: int,
    foreign: int,
    *,
    pass_rates: Mapping[str, float],
    neighbour: Callable[[str], str] = str,
    domain: OwnDomain | None = None,
    turn: int = 0,
) -> Selection:
    """Select all own groups in their order, and the most useful foreign ones (`algorithms.usefulness`).

    The other foreign ones are dropped, because a group loses its use while it waits.

    `pass_rates`: this node's, by the task that a prompt names. Groups that teach nothing come after all others.
    `domain` as in `choose_newest`: which side a group is of counts before its score. `turn` counts the steps.
    """
    theirs = [c for c in candidates if not c.own]
    sides = _split([c for c in theirs if has_signal(c.rewards)], foreign, domain=domain, turn=turn)
    scores = {c.id: usefulness(c.rewards, pass_rates.get(c.task)) for c in theirs}
    chosen = [c for side, num in sides for c in _best(side, num, scores=scores, neighbour=neighbour, turn=turn)]
    without_signal = [c for c in theirs if not has_signal(c.rewards)]
    chosen += choose_foreign(without_signal, foreign - len(chosen), neighbour=neighbour)
    ids = {candidate.id for candidate in chosen}
    return Selection((*choose_own(candidates, own), *chosen), tuple(c for c in theirs if c.id not in ids))


def _best(
    candidates: Sequence[Candidate],
    count: int,
    *,
    scores: Mapping[bytes, float],
    neighbour: Callable[[str], str],
    turn: int,
) -> list[Candidate]:
    """Select `count` of the highest scores, at most an even share of each neighbor while others have groups left.

    The share is rounded up. If a neighbor has too few groups, the others share its places evenly. That takes a few
    rounds: each halves the places that are left or the neighbors that have groups.
    """
    chosen: list[Candidate] = []
    left = _ranked(candidates, scores=scores, turn=turn)
    while left and len(chosen) < count:
        share = math.ceil((count - len(chosen)) / len({neighbour(c.sender) for c in left}))
        held, passed_over = Counter[str](), []
        for candidate in left:
            name = neighbour(candidate.sender)
            if len(chosen) < count and held[name] < share:
                held[name] += 1
                chosen.append(candidate)
            else:
                passed_over.append(candidate)
        left = passed_over
    return chosen


def _ranked(candidates: Sequence[Candidate], *, scores: Mapping[bytes, float], turn: int) -> list[Candidate]:
    """By score; among equal ones senders take turns, those of its newest weights first; who begins changes with `turn`.

    Clocks do not count: which of two groups was made first is chance.
    """
    senders = sorted({c.sender for c in candidates})
    places = {sender: (index - turn) % len(senders) for index, sender in enumerate(senders)}
    num_before = Counter[tuple[str, float]]()
    ranked = []
    for candidate in sorted(candidates, key=lambda c: (-c.policy_version, c.task, c.prompt_index, c.arrival)):
        alike = candidate.sender, scores[candidate.id]
        ranked.append((-scores[candidate.id], num_before[alike], places[candidate.sender], candidate))
        num_before[alike] += 1
    return [candidate for *_, candidate in sorted(ranked, key=itemgetter(0, 1, 2))]


def choose_own(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The `count` own groups that wait longest: every own group is used while it is fresh."""
    return sorted((c for c in candidates if c.own), key=lambda c: c.arrival)[:count]


def choose_foreign(
    candidates: Sequence[Candidate], count: int, *, neighbour: Callable[[str], str] = str
) -> list[Candidate]:
    """Select `count` foreign groups, spread over senders, the newest of each first.

    Neighbors take turns, and so do the senders of one neighbor (`neighbour` maps a sender to it). A sender with more
    groups than others gets more places only when the others have run out.
    """
    by_sender: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda c: (c.created_at, c.arrival), reverse=True):
        if not candidate.own:
            by_sender[candidate.sender].append(candidate)
    by_neighbour: dict[str, list[list[Candidate]]] = defaultdict(list)
    for sender in sorted(by_sender):
        by_neighbour[neighbour(sender)].append(by_sender[sender])
    queues = [_in_turn(by_neighbour[name]) for name in sorted(by_neighbour)]
    return _in_turn(queues)[:count]


def _in_turn(queues: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Interleave the queues: one of each, then another of each that has more, and so on."""
    return [candidate for turn in zip_longest(*queues) for candidate in turn if candidate is not None]


def choose_evicted(
    candidates: Sequence[Candidate], *, keep: int, cap: ShareCap, keep_bytes: int | None = None
) -> list[Candidate]:
    """Return the foreign groups to evict, so that at most `keep` stay, of `keep_bytes` together.

    No neighbor may hold more than its places. The neighbor with the most groups loses its oldest first, so a
    peer that sends more or larger groups than others evicts its own.
    """
    by_neighbour: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda c: (c.created_at, c.arrival), reverse=True):
        if not candidate.own:
            by_neighbour[cap.neighbour(candidate.sender)].append(candidate)
    evicted: list[Candidate] = []
    for name, held in by_neighbour.items():
        places = cap.places(name, num_neighbours=len(by_neighbour), capacity=keep)
        evicted += held[places:]
        del held[places:]
    excess = sum(map(len, by_neighbour.values())) - keep
    evicted += [max(by_neighbour.values(), key=len).pop() for _ in range(excess)]
    return evicted + _beyond_bytes(by_neighbour, keep_bytes)


def _beyond_bytes(by_neighbour: dict[str, list[Candidate]], keep_bytes: int | None) -> list[Candidate]:
    """Return the groups beyond `keep_bytes`, by neighbor, the newest first."""
    sizes = {name: sum(candidate.num_bytes for candidate in held) for name, held in by_neighbour.items()}
    total, evicted = sum(sizes.values()), []
    while keep_bytes is not None and total > keep_bytes:
        name = max(sizes, key=sizes.__getitem__)
        evicted.append(by_neighbour[name].pop())
        sizes[name] -= evicted[-1].num_bytes
        total -= evicted[-1].num_bytes
    return evicted


@dataclass(frozen=True, slots=True)
class Freshness:
    """Age limits. Times are Unix seconds; versions count weight updates of this node, which is `peer_id`."""

    now: float
    max_age_s: float
    policy_version: int
    max_version_lag: int
    peer_id: str | None = None

    def is_stale(self, candidate: Candidate) -> bool:
        """Return whether a group is too old; only versions of this node's own weights are comparable."""
        if self.now - candidate.created_at > self.max_age_s:
            return True
        by_our_weights = candidate.own or (candidate.weights_of is not None and candidate.weights_of == self.peer_id)
        return by_our_weights and self.policy_version - candidate.policy_version > self.max_version_lag
