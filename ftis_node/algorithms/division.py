"""Allocation of a task mixture's parts to a node: it generates more of the parts where it has a comparative advantage.

A group without a signal (all rewards equal) gives no gradient. For each part a node counts its own groups, its peers'
groups, and how many of each had a signal:

    rate(part)  = (PRIOR_SIGNALS + groups with a signal) / (PRIOR_GROUPS + groups)
    share(part) ~ proportion in the mixture x own rate / max(peers' rate, LEAST_PEER_RATE)

Own rate over peers' rate is Ricardo's comparative advantage (Principles of Political Economy and Taxation, 1817,
chapter 7). A node that is better than its peers at every part still generates most for the part of its largest lead.
Each step multiplies the counts by DECAY.

Groups of peers can change the proportion of two parts by at most 1 / LEAST_PEER_RATE, whatever their rewards are. A
peer may make groups without a signal on purpose. It still cannot displace a node from a part in which the node's own
groups have a signal. Of two equal parts with equal own rates each keeps at least 23 %. Only own groups without a signal
reduce a part to its minimum, which is LEAST_OF_EVEN of its proportion. The minimum is above 0, so that a node notices
when its groups begin to have a signal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        """Return the count with one more group."""
        return SignalCount(self.signals + has_signal, self.groups + 1)

    def faded(self) -> SignalCount:
        """Return the count after the decay of one step."""
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
    """Return the probability of keeping a problem of each part, which turns draws in `proportions` into draws in
    `shares`.

    The largest probability is 1, so the fewest possible problems are skipped.
    """
    ratios = {part: share / proportions[part] for part, share in shares.items()}
    largest = max(ratios.values())
    return {part: ratio / largest for part, ratio in ratios.items()}
