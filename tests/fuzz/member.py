"""Run a long simulation of hostile members and a node's loops by hand.

    python -m tests.fuzz.member --steps 10000 --seed 1

Rules and values come from a seeded random source. The tests run the same rules by hypothesis, which stores each choice
and therefore ends an example after some hundred steps. A failure prints the last steps; the same seed repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import deque

from tests.fuzz.actions import CHOICES, RULES
from tests.fuzz.fuzzed_node import quiet
from tests.fuzz.simulation import Simulation

NUM_SHOWN = 25


def play(steps: int, seed: int, *, quiet: bool = False) -> Simulation:
    """Run a simulation and return it closed. After a failure it prints the last steps and raises the error."""
    rng = random.Random(seed)
    last: deque[str] = deque(maxlen=NUM_SHOWN)
    simulation = Simulation()
    try:
        simulation.start()
        for number in range(1, steps + 1):
            name = rng.choice(CHOICES)
            last.append(f"{number} {name}")
            simulation.step(RULES[name], rng)
            if not quiet and number % 500 == 0:
                sys.stdout.write(f"{number} steps, {simulation.clock.steady_s - 1000:.0f} s of the node's time\n")
                sys.stdout.flush()
        simulation.audit()
    except BaseException:
        sys.stdout.write("the last steps: " + ", ".join(last) + "\n")
        raise
    finally:
        simulation.close()
    return simulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began_at = time.perf_counter()
    try:
        with quiet():
            simulation = play(options.steps, options.seed)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    counters = simulation.victim.parts.counters
    sys.stdout.write(
        f"{simulation.num_steps} steps with seed {options.seed} in {time.perf_counter() - began_at:.0f} s, "
        f"{simulation.clock.steady_s - 1000:.0f} s of the node's time, {simulation.num_identities} hostile identities\n"
        f"rules: {dict(simulation.done)}\nrefused: {dict(counters.refused)}\n"
        f"admitted: {simulation.admitted[simulation.honest.parts.context.peer_id]} of the honest member, "
        f"{sum(simulation.admitted.values())} in total; the slowest honest group took {simulation.longest_s:.2f} s\n"
    )


if __name__ == "__main__":
    main()
