"""How much a node pulls: everything in a small swarm, what its learner will use in a large one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.config.node import PullRule

STEPS_IN_STOCK = 2  # foreign groups that wait for the learner: those of the next step, and of the one after it
STEPS_ON_DUTY = 4  # a node with so many steps' groups on the way leaves its duties to the next in turn


@dataclass(frozen=True, slots=True)
class Demand:
    """What the pull rule makes of the state of things. `need` None: everything that is announced."""

    need: int | None
    takes_duties: bool


def demand(
    rule: PullRule, *, num_members: int, small_swarm: int, per_step: int, num_ready: int, num_in_flight: int
) -> Demand:
    """What to pull now, when a step takes `per_step` foreign groups, and `num_ready` wait while others are on the way.

    `auto` is `all` in a swarm of up to `small_swarm` other members, `needed` in a larger one.

    Duties are no question of appetite: a learner slower than the others is soon full, and so are all where a few make
    more than is used; were duties left then, a group in ten would find nobody. Each costs its group once, and no more
    fall to a node than an average member of its shard makes.
    """
    if rule == "all" or (rule == "auto" and num_members <= small_swarm):
        return Demand(need=None, takes_duties=True)
    stock = num_ready + num_in_flight
    return Demand(need=max(0, STEPS_IN_STOCK * per_step - stock), takes_duties=num_in_flight < STEPS_ON_DUTY * per_step)
