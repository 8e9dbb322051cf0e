"""How much a node pulls: everything in a small swarm, what its learner will use in a large one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.config.node import PullRule

STEPS_IN_STOCK = 2  # foreign groups that wait for the learner: those of the next step, and of the one after it
MAX_ASSIGNED_STEPS = 4  # a node with so many steps' groups on the way leaves its duties to the next in turn


@dataclass(frozen=True, slots=True)
class PullDemand:
    """What the pull rule makes of the state of things. `need` None: everything that is announced."""

    need: int | None
    takes_assigned: bool


def pull_demand(
    rule: PullRule, *, num_members: int, small_swarm: int, per_step: int, num_ready: int, num_in_flight: int
) -> PullDemand:
    """What to pull now, when a step takes `per_step` foreign groups, and `num_ready` wait while others are on the way.

    `auto` is `all` in a swarm of up to `small_swarm` other members, `needed` in a larger one.

    Duties are no question of appetite: a learner slower than the others is soon full, and so are all where a few make
    more than is used; were duties left then, a group in ten would find nobody. Each costs its group once, and no more
    fall to a node than an average member of its shard makes.
    """
    if rule == "all" or (rule == "auto" and num_members <= small_swarm):
        return PullDemand(need=None, takes_assigned=True)
    stock = num_ready + num_in_flight
    return PullDemand(
        need=max(0, STEPS_IN_STOCK * per_step - stock), takes_assigned=num_in_flight < MAX_ASSIGNED_STEPS * per_step
    )
