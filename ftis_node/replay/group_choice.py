"""The choice of a step's groups among the READY ones, the eviction of foreign ones, and the age limits of groups.

Pure functions without a database. A plug-in's rule may use the parts of these rules:

    rule(candidates, own, foreign, step) -> the groups of the step, at most `own` and `foreign` of each

`candidates` are `Candidate`s; all that the rule does not return stay READY.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import TypeAlias

from ftis_node.errors import ConfigError
from ftis_node.plugins import CHOICE_GROUP, call_plugin, load_function
from ftis_node.swarm.rate_limits import ShareCap

MAX_PER_PROBLEM = 2  # READY groups of one sender about one problem; a step uses one of them


@dataclass(frozen=True, slots=True)
class Candidate:
    """A READY group as the rules see it. `arrival` is its order of admission, `num_bytes` its envelope's size.

    `created_at` has whole milliseconds, so `number`, the sender's count, orders the groups that one sampled at once.

    `problem` is the hash of the problem's messages, because several indices of a task may have one text.
    """

    id: bytes
    sender: str
    own: bool
    arrival: int
    created_at: float
    policy_version: int
    problem: bytes
    task: str = ""
    rewards: tuple[float, ...] = ()
    weights_of: str | None = None
    num_bytes: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Result of a rule: the groups of the step, and the groups to release without using them. All others stay READY."""

    taken: tuple[Candidate, ...]
    discarded: tuple[Candidate, ...] = ()


ChoiceRule: TypeAlias = Callable[[Sequence[Candidate], int, int], Selection]
"""Takes the candidates and the numbers of own and foreign groups to choose."""


def choose_newest(
    candidates: Sequence[Candidate], own: int, foreign: int, *, neighbor: Callable[[str], str] = str
) -> Selection:
    """Select the own groups that arrived first, and the newest foreign ones, taking turns among their senders."""
    theirs = [c for c in candidates if not c.own]
    return Selection((*choose_own(candidates, own), *choose_foreign(theirs, foreign, neighbor=neighbor)))


def choose_same_prompts(
    candidates: Sequence[Candidate], own: int, foreign: int, *, neighbor: Callable[[str], str] = str
) -> Selection:
    """Select as `choose_newest` for the horizontal mode: peers' answers to the step's own prompts come first."""
    mine = choose_own(candidates, own)
    prompts = {candidate.problem for candidate in mine}
    matching = [c for c in candidates if not c.own and c.problem in prompts]
    chosen = choose_foreign(matching, foreign, neighbor=neighbor, share_problems=True)
    others = [c for c in candidates if not c.own and c.problem not in prompts]
    rest = choose_foreign(others, foreign - len(chosen), neighbor=neighbor, share_problems=True)
    return Selection((*mine, *chosen, *rest))


def choose_sapo(candidates: Sequence[Candidate], own: int, foreign: int, *, seed: int) -> Selection:
    """Select by Swarm sAmpling (arXiv 2509.08721): draw uniformly among the groups with a learning signal.

    All groups that are not drawn are discarded. The next step draws from the groups that arrive until then. The paper's
    best is 4 own and 4 foreign groups. Missing groups of one side are not replaced from the other, because the share of
    foreign data would then differ from the setting. The same arguments always give the same choice.
    """
    generator = random.Random(seed)
    ordered = sorted(candidates, key=lambda c: (not c.own, c.sender, c.number, c.arrival))
    mine = [c for c in ordered if c.own and has_signal(c.rewards)]
    theirs = [c for c in _one_per_problem([c for c in ordered if not c.own]) if has_signal(c.rewards)]
    drawn = {
        c.id for side, num in ((mine, own), (theirs, foreign)) for c in generator.sample(side, min(num, len(side)))
    }
    return Selection(tuple(c for c in ordered if c.id in drawn), tuple(c for c in ordered if c.id not in drawn))


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether a group gives a gradient: if all rewards are equal, every advantage is 0."""
    return len(set(rewards)) > 1


def choose_own(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Select the `count` own groups that arrived first, so that every own group is used while it is fresh."""
    return sorted((c for c in candidates if c.own), key=lambda c: c.arrival)[:count]


def choose_foreign(
    candidates: Sequence[Candidate],
    count: int,
    *,
    neighbor: Callable[[str], str] = str,
    share_problems: bool = False,
) -> list[Candidate]:
    """Select `count` foreign groups, spread over senders, the newest of each first.

    Neighbors take turns, and so do the senders of one neighbor (`neighbor` maps a sender to it). A sender with more
    groups than others gets more places only when the others have run out. No sender gets two places for one problem.
    Two senders get places for one problem only with `share_problems`, or if there are no other problems. So a copy of
    an answer, which may be too likely to be detected, does not double its weight.
    """
    by_sender = newest_by(_one_per_problem(candidates), lambda sender: sender)
    by_neighbor: dict[str, list[list[Candidate]]] = defaultdict(list)
    for sender in sorted(by_sender):
        by_neighbor[neighbor(sender)].append(by_sender[sender])
    queues = [_in_turn(by_neighbor[name]) for name in sorted(by_neighbor)]
    return (_in_turn if share_problems else _in_turn_by_problem)(queues)[:count]


def _one_per_problem(candidates: Sequence[Candidate]) -> list[Candidate]:
    newest: dict[tuple[str, bytes], Candidate] = {}
    for candidate in candidates:
        key = candidate.sender, candidate.problem
        newest[key] = max(newest.get(key, candidate), candidate, key=_by_age)
    return [c for c in candidates if newest[c.sender, c.problem] is c]


def _in_turn_by_problem(queues: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Merge the queues, one group of each in turn; further groups about a problem come after all other problems."""
    waiting = [deque(queue, len(queue)) for queue in queues]
    repeated: list[list[Candidate]] = [[] for _ in queues]
    ordered: dict[bytes, Candidate] = {}
    while any(waiting):
        for queue, others in zip(waiting, repeated, strict=True):
            while queue and queue[0].problem in ordered:
                others.append(queue.popleft())
            if queue:
                candidate = queue.popleft()
                ordered[candidate.problem] = candidate
    return [*ordered.values(), *_in_turn(repeated)]


def _in_turn(queues: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    return [candidate for turn in zip_longest(*queues) for candidate in turn if candidate is not None]


def _by_age(candidate: Candidate) -> tuple[float, int, int]:
    return candidate.created_at, candidate.number, candidate.arrival


def newest_by(candidates: Sequence[Candidate], name: Callable[[str], str]) -> dict[str, list[Candidate]]:
    """Return the foreign groups by the `name` of their sender, the newest of each first."""
    by_name: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=_by_age, reverse=True):
        if not candidate.own:
            by_name[name(candidate.sender)].append(candidate)
    return by_name


@lru_cache(maxsize=16)
def load_choice(name: str) -> Callable[..., Selection]:
    """Return the choice of the plug-in `name`, which takes the arguments of a rule and `step`.

    It checks the result: a group that is not READY, or twice in a step, would corrupt both. Raises ConfigError if there
    is no such plug-in, or for a faulty one.
    """
    plugin, rule = load_function(CHOICE_GROUP, name, error=ConfigError)
    if plugin is None or rule is None:
        raise ConfigError(f"no choice {name!r} is installed")

    def choose(candidates: Sequence[Candidate], own: int, foreign: int, *, step: int) -> Selection:
        chosen = call_plugin(plugin, lambda: tuple(rule(candidates, own, foreign, step)), error=ConfigError)
        known = set(candidates)
        if not all(isinstance(each, Candidate) and each in known for each in chosen):
            raise ConfigError(f"{plugin} gave something that is not one of the ready groups")
        num_own = sum(each.own for each in chosen)
        if len(set(chosen)) < len(chosen) or num_own > own or len(chosen) - num_own > foreign:
            raise ConfigError(
                f"{plugin} gave {num_own} own and {len(chosen) - num_own} foreign groups, {len(set(chosen))} of them "
                f"different: at most {own} and {foreign} may be taken, each once"
            )
        return Selection(chosen)

    return choose


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
