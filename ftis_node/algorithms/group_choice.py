"""Choice of a step's groups: the rule of Swarm sAmpling Policy Optimization (arXiv 2509.08721).

A node discards groups without a signal: all rewards are equal, so every advantage is 0. It then samples uniformly, I
from its own and J from the others'. The paper's best is 4 of each. Departures: own and foreign groups are treated
alike. If fewer groups remain than requested, all of them are taken. The other side does not fill the gap, because the
share of foreign data would then differ from the setting.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """The chosen groups: ascending positions in the two lists that the caller passed to `choose_groups`."""

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
    """Return at most `num_own` and `num_foreign` groups with a signal, sampled uniformly without replacement.

    Each list has one sequence of rewards a group. `is_near` marks the foreign groups of the node's own domain; None: no
    domains. `near_share` is the share of near groups, averaged over seeds that count the steps. The same arguments
    always give the same choice.
    """
    generator = random.Random(seed)
    own = _sample(_with_signal(own_rewards), num_own, generator)
    with_signal = _with_signal(foreign_rewards)
    if is_near is None:
        return GroupChoice(own=own, foreign=_sample(with_signal, num_foreign, generator))
    near = [position for position in with_signal if is_near[position]]
    far = [position for position in with_signal if not is_near[position]]
    sizes = split_foreign(num_foreign, num_near=len(near), num_far=len(far), share=near_share, turn=seed)
    drawn = [_sample(side, num, generator) for side, num in zip((near, far), sizes, strict=True)]
    return GroupChoice(own=own, foreign=tuple(sorted(drawn[0] + drawn[1])))


def split_foreign(num_foreign: int, *, num_near: int, num_far: int, share: float, turn: int) -> tuple[int, int]:
    """Return how many of a step's foreign groups come from the node's own domain, and how many from others.

    `num_near` and `num_far` groups are available. If both sides have enough, `share` of the taken ones are near,
    exactly over many steps, which `turn` counts. If one side has too few, the other fills the gap.
    """
    num_own_domain = math.floor(share * num_foreign * turn) - math.floor(share * num_foreign * (turn - 1))
    far = min(num_foreign - min(num_own_domain, num_near), num_far)
    return min(num_foreign - far, num_near), far


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether a group gives a gradient: if all rewards are equal, every advantage is 0."""
    return len(set(rewards)) > 1


def _with_signal(groups: Sequence[Sequence[float]]) -> list[int]:
    return [position for position, rewards in enumerate(groups) if has_signal(rewards)]


def _sample(positions: list[int], size: int, generator: random.Random) -> tuple[int, ...]:
    return tuple(sorted(generator.sample(positions, min(size, len(positions)))))
