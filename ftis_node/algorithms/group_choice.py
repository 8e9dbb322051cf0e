"""Which groups a step learns from: Swarm sAmpling Policy Optimization's rule (arXiv 2509.08721).

A node with many groups at hand, its own and its peers', first discards those that teach nothing (all rewards equal, so
every advantage is 0) and then samples uniformly, I from its own and J from the others'. The paper's best is 4 of each.

Decided here: own and foreign groups are treated alike; and where fewer are left than asked for, all of them are taken
and the gap is not filled from the other side, or the share of foreign data would no longer be what was set.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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
) -> GroupChoice:
    """At most `num_own` and `num_foreign` groups, uniformly without replacement among those that teach something.

    Each argument holds one sequence of rewards a group. The same arguments always give the same choice.
    Raises ValueError if a number is negative.
    """
    if num_own < 0 or num_foreign < 0:
        raise ValueError(f"num_own and num_foreign must be >= 0, not {num_own} and {num_foreign}")
    generator = random.Random(seed)
    own = _sample(own_rewards, num_own, generator)
    return GroupChoice(own=own, foreign=_sample(foreign_rewards, num_foreign, generator))


def _sample(groups: Sequence[Sequence[float]], num_wanted: int, generator: random.Random) -> tuple[int, ...]:
    teaching = [position for position, rewards in enumerate(groups) if len(set(rewards)) > 1]
    return tuple(sorted(generator.sample(teaching, min(num_wanted, len(teaching)))))
