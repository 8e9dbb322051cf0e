"""Choice of a step's groups: the rule of Swarm sAmpling Policy Optimization (arXiv 2509.08721).

A node discards groups without a signal: all rewards are equal, so every advantage is 0. It then samples uniformly, I
from its own and J from the others'. The paper's best is 4 of each. Departures: own and foreign groups are treated
alike. If fewer groups remain than requested, all of them are taken. The other side does not fill the gap, because the
share of foreign data would then differ from the setting.

The parts of a task mixture are divided among nodes: a node generates more where it has a comparative advantage.

    rate(part)  = (PRIOR_SIGNALS + groups with a signal) / (PRIOR_GROUPS + groups)
    share(part) ~ proportion in the mixture x own rate / max(peers' rate, LEAST_PEER_RATE)

Own rate over peers' rate is Ricardo's comparative advantage (Principles of Political Economy and Taxation, 1817,
chapter 7). A node that is better than its peers at every part still generates most for the part of its largest lead.

Groups of peers can change the proportion of two parts by at most 1 / LEAST_PEER_RATE, whatever their rewards are. Of
two equal parts with equal own rates each keeps at least 23 %. Only own groups without a signal reduce a part to its
minimum, LEAST_OF_EVEN of its proportion. There a node still notices when its groups begin to have a signal.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HALF_LIFE_VERSIONS = 4  # updates after which an own group has half its weight in the pass rate
PRIOR_SIGNALS, PRIOR_GROUPS = 1.0, 2.0
DECAY = 0.9  # factor of the counts, each step
LEAST_PEER_RATE = 0.25
LEAST_OF_EVEN = 0.1
MIN_PEER_GROUPS = 1.0  # sum of the decayed counts of all parts; below it the shares are the proportions


class SignalCount(NamedTuple):
    """Counts of groups of one part, and of those that had a signal. Both decay, so they are not integers."""

    signals: float = 0.0
    groups: float = 0.0

    @property
    def rate(self) -> float:
        """Return the smoothed share of groups with a signal, in (0, 1); 1/2 without groups."""
        return (PRIOR_SIGNALS + self.signals) / (PRIOR_GROUPS + self.groups)

    def with_group(self, *, has_signal: bool) -> SignalCount:
        return SignalCount(self.signals + has_signal, self.groups + 1)

    def faded(self) -> SignalCount:
        return SignalCount(self.signals * DECAY, self.groups * DECAY)


def division_shares(
    proportions: Mapping[str, float], own: Mapping[str, SignalCount], peers: Mapping[str, SignalCount]
) -> dict[str, float]:
    """Return the share of each part in a node's generation; the shares sum to 1.

    `proportions` are the mixture's and sum to 1; `own` and `peers` hold the counts of the same parts. Without peers'
    groups the shares are the proportions.
    """
    if sum(peers[part].groups for part in proportions) < MIN_PEER_GROUPS:
        return dict(proportions)
    advantages = {
        part: even * own[part].rate / max(peers[part].rate, LEAST_PEER_RATE) for part, even in proportions.items()
    }
    total = sum(advantages.values())
    return {
        part: LEAST_OF_EVEN * even + (1 - LEAST_OF_EVEN) * advantages[part] / total
        for part, even in proportions.items()
    }


def keep_chances(shares: Mapping[str, float], proportions: Mapping[str, float]) -> dict[str, float]:
    """Return the probability of keeping a problem of each part that turns draws in `proportions` into `shares`.

    The largest probability is 1, so the fewest possible problems are skipped.
    """
    ratios = {part: share / proportions[part] for part, share in shares.items()}
    largest = max(ratios.values())
    return {part: ratio / largest for part, ratio in ratios.items()}


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
    always give the same choice. Raises ValueError if a number is negative.
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


def usefulness(rewards: Sequence[float], pass_rate: float | None) -> float:
    """Return the usefulness of a group: the variance of its rewards x (1 - pass rate), at most 1/4.

    `pass_rate` is the node's own for this kind of prompt; None: not yet measured. Equal rewards give exactly 0.
    """
    if not has_signal(rewards):
        return 0.0
    mean = fmean(rewards)
    return fmean((reward - mean) ** 2 for reward in rewards) * (1.0 - (pass_rate or 0.0))


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether a group gives a gradient: if all rewards are equal, every advantage is 0."""
    return len(set(rewards)) > 1


def pass_rates(groups: Iterable[tuple[str, int, Sequence[float]]]) -> dict[str, float]:
    """Return the exponential moving average of the groups' mean rewards, by kind of prompt, in any input order.

    Each group has its kind, the policy version that sampled it, and its rewards. A group weighs half as much as one
    that is HALF_LIFE_VERSIONS newer.
    """
    means: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for kind, version, rewards in groups:
        means[kind].append((version, fmean(rewards)))
    rates = {}
    for kind, of_kind in means.items():
        ordered = sorted(of_kind)
        weights = [0.5 ** ((ordered[-1][0] - version) / HALF_LIFE_VERSIONS) for version, _ in ordered]
        rates[kind] = fmean([mean for _, mean in ordered], weights)
    return rates


def _teaching(groups: Sequence[Sequence[float]]) -> list[int]:
    return [position for position, rewards in enumerate(groups) if has_signal(rewards)]


def _sample(positions: list[int], size: int, generator: random.Random) -> tuple[int, ...]:
    return tuple(sorted(generator.sample(positions, min(size, len(positions)))))
