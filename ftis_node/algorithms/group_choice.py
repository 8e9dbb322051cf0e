"""Which groups a step learns from: Swarm sAmpling Policy Optimization's rule (arXiv 2509.08721).

A node with many groups at hand, its own and its peers', first discards those that teach nothing (all rewards equal, so
every advantage is 0) and then samples uniformly, I from its own and J from the others'. The paper's best is 4 of each.

Decided here: own and foreign groups are treated alike; and where fewer are left than asked for, all of them are taken
and the gap is not filled from the other side, or the share of foreign data would no longer be what was set.

Where nodes have domains, the same is asked once more of the foreign groups: how many are from the node's own domain,
and how many from others. That share is a preference, so there the gap is filled.

`usefulness` orders groups instead of drawing them: by what their rewards teach, and how much of their kind is new.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HALF_LIFE_VERSIONS = 4  # after so many updates an own group counts half in the pass rate


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Positions, ascending, in the two lists that `choose_groups` was given."""

    own: tuple[int, ...]
    foreign: tuple[int, ...]


def choose_groups(
    own_rewards: Sequence[Sequence[float]],
    foreign_rewards: Sequence[Sequence[float]],
    *,
    num_own: int = 4,
    num_foreign: int = 4,
    seed: int,
    is_near: Sequence[bool] | None = None,
    near_share: float = 0.0,
) -> GroupChoice:
    """At most `num_own` and `num_foreign` groups, uniformly without replacement among those that teach something.

    Each argument holds one sequence of rewards a group. `is_near` says of each foreign group whether it is of the
    node's own domain, of which `near_share` are to be, over seeds that count the steps; None: all are alike. The same
    arguments always give the same choice. Raises ValueError if a number is negative.
    """
    if num_own < 0 or num_foreign < 0:
        raise ValueError(f"num_own and num_foreign must be >= 0, not {num_own} and {num_foreign}")
    generator = random.Random(seed)
    own = _sample(_teaching(own_rewards), num_own, generator)
    teaching = _teaching(foreign_rewards)
    if is_near is None:
        return GroupChoice(own=own, foreign=_sample(teaching, num_foreign, generator))
    near = [position for position in teaching if is_near[position]]
    far = [position for position in teaching if not is_near[position]]
    wanted = split_foreign(num_foreign, num_near=len(near), num_far=len(far), share=near_share, turn=seed)
    drawn = [_sample(side, num, generator) for side, num in zip((near, far), wanted, strict=True)]
    return GroupChoice(own=own, foreign=tuple(sorted(drawn[0] + drawn[1])))


def split_foreign(num_foreign: int, *, num_near: int, num_far: int, share: float, turn: int) -> tuple[int, int]:
    """How many of a step's foreign groups to take from the node's own domain, and how many from others.

    Of `num_near` and `num_far` that are there. `share` of them are near where both sides have enough; over many steps,
    counted by `turn`, exactly so: what cannot be had in whole groups in one step is made up for in the next ones. What
    one side has not got the other fills.
    """
    wanted = math.floor(share * num_foreign * turn) - math.floor(share * num_foreign * (turn - 1))
    far = min(num_foreign - min(wanted, num_near), num_far)
    return min(num_foreign - far, num_near), far


def usefulness(rewards: Sequence[float], pass_rate: float | None) -> float:
    """What a group is worth to a node that answers its kind of prompt with `pass_rate`; None: it never answered one.

    Variance of the rewards x (1 - pass rate), at most 1/4: the variance is p (1 - p) where p of the rewards are 1 and
    the others 0. Exactly 0 where all rewards are equal.
    """
    if not has_signal(rewards):
        return 0.0
    mean = fmean(rewards)
    return fmean((reward - mean) ** 2 for reward in rewards) * (1.0 - (pass_rate or 0.0))


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group teaches something: where all rewards are equal, every advantage is 0."""
    return len(set(rewards)) > 1


def pass_rates(groups: Iterable[tuple[str, int, Sequence[float]]]) -> dict[str, float]:
    """By kind of prompt, the exponential mean of the groups' mean rewards, whatever their order.

    Of each group its kind, the policy version that sampled it and its rewards. A group counts half of one that is
    HALF_LIFE_VERSIONS newer.
    """
    means: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for kind, version, rewards in groups:
        means[kind].append((version, fmean(rewards)))
    return {kind: _newest_weighted(sorted(of_kind)) for kind, of_kind in means.items()}


def _newest_weighted(means: list[tuple[int, float]]) -> float:
    newest, _ = means[-1]
    weights = [0.5 ** ((newest - version) / HALF_LIFE_VERSIONS) for version, _ in means]
    return fmean([mean for _, mean in means], weights)


def _teaching(groups: Sequence[Sequence[float]]) -> list[int]:
    return [position for position, rewards in enumerate(groups) if has_signal(rewards)]


def _sample(positions: list[int], num_wanted: int, generator: random.Random) -> tuple[int, ...]:
    return tuple(sorted(generator.sample(positions, min(num_wanted, len(positions)))))
