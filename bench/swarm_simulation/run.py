"""Runs one simulated swarm from start to result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_simulation.result import SimulationResult, make_result
from swarm_simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarm_simulation.settings import SimulationSettings


def simulate(settings: SimulationSettings, *, progress: Callable[[float], None] = lambda _: None) -> SimulationResult:
    """Run one swarm; `progress` is called with the virtual time about every ten virtual seconds."""
    world = World(settings)
    world.populate()
    world.events.run_until(settings.warm_up_s)
    world.reset()
    while world.events.now < settings.end_s:
        world.events.run_until(min(settings.end_s, world.events.now + 10.0))
        progress(world.events.now)
    return make_result(world)
