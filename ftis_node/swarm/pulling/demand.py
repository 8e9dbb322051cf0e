"""Pull rule: how many groups to pull, and how many of them from the node's own domain.

A node pulls all groups in a small swarm, and as many as its learner needs in a large one.

The run's `step.own_domain_fraction` is the target fraction among the groups that wait for the learner. A sender's
domain is only a claim, so it affects only the order of pulls. If one side has too few groups, the other fills the gap.
The task of a stored group is verified, and steps select by it (`algorithms/group_choice.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ftis_node.config.node import PullRule

STEPS_IN_STOCK = 2  # remote groups kept ready for the learner: for the next step and the one after it
MAX_ASSIGNED_STEPS = 4  # if more are in flight, a node leaves its assigned groups to the next member


@dataclass(frozen=True, slots=True)
class PullDemand:
    """Result of the pull rule. `need` is the number of groups to pull; None: all announced groups."""

    need: int | None
    takes_assigned: bool


def pull_demand(
    rule: PullRule, *, num_members: int, small_swarm: int, per_step: int, num_ready: int, num_in_flight: int
) -> PullDemand:
    """Return what to pull now, if a step takes `per_step` remote groups and `num_ready` wait for the learner.

    `auto` means `all` in a swarm of up to `small_swarm` other members, `needed` in a larger one.

    Assigned groups are pulled even if the learner needs none. Otherwise one group in ten would find no holder whenever
    a few nodes generate more than the learners use. Each assigned group costs one pull, and a node is assigned no more
    groups than an average member of its shard generates.
    """
    if rule == "all" or (rule == "auto" and num_members <= small_swarm):
        return PullDemand(need=None, takes_assigned=True)
    stock = num_ready + num_in_flight
    return PullDemand(
        need=max(0, STEPS_IN_STOCK * per_step - stock), takes_assigned=num_in_flight < MAX_ASSIGNED_STEPS * per_step
    )


class DomainPortion(NamedTuple):
    """Part of the announced groups: `num` of the own domain (`near`), of others, or (None) of any; `num` None: all."""

    num: int | None
    near: bool | None


ANY = DomainPortion(num=None, near=None)


@dataclass(frozen=True, slots=True)
class OwnDomain:
    """The tasks of a node's domain, and the preferred fraction of remote groups from that domain."""

    tasks: frozenset[str]
    share: float

    def is_claimed(self, parts: frozenset[str]) -> bool:
        """Return whether all `parts` for which a peer generates are in this domain; false if empty (the whole task)."""
        return bool(parts) and parts <= self.tasks


def portions(share: float, *, stock: int, need: int | None, num_near: int, num_far: int) -> tuple[DomainPortion, ...]:
    """Return the order of pulls for a stock of `stock` groups; `num_near` and `num_far` are stored or in flight.

    `need` is the number to pull in all; None: everything. Each side is pulled up to its part of the stock even if the
    other side has filled the gap. So at most twice the stock waits. The last portion is always for any side and bounded
    by `need` alone.
    """
    want_near = round(share * stock)
    lack_near, lack_far = max(0, want_near - num_near), max(0, stock - want_near - num_far)
    if need is None:  # everything, beginning with the side that is further below its part
        return DomainPortion(None, near=num_near <= share * (num_near + num_far)), ANY
    sides = DomainPortion(lack_near, near=True), DomainPortion(lack_far, near=False)
    return (*(sides if share >= 0.5 else sides[::-1]), ANY)
