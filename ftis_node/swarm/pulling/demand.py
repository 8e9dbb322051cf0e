"""Number of groups to pull: all in a small swarm, as many as the learner needs in a large one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
