"""Hostile members against a real node's loops. With `SIMULATION_STEPS=10000` in the environment it runs longer."""

import os
import random

from tests.fuzz.actions import CHOICES, RULES
from tests.fuzz.simulation import Simulation

NUM_STEPS = int(os.environ.get("SIMULATION_STEPS", "150"))


def play(seed: int) -> Simulation:
    simulation, rng = Simulation(), random.Random(seed)
    simulation.play(RULES, rng.choices(CHOICES, k=NUM_STEPS), rng)
    return simulation


def test_invariants_hold_beside_hostile_members_and_a_seed_reproduces_the_run():
    simulation, again = play(9), play(9)
    assert simulation.clock.steady_s == again.clock.steady_s
    assert simulation.victim.parts.peers.counters.refused == again.victim.parts.peers.counters.refused
    assert simulation.num_honest_admitted >= NUM_STEPS // 5
    assert sum(simulation.admitted.values()) > simulation.num_honest_admitted
    assert simulation.victim.parts.peers.counters.refused.total() > 0
