"""By hand: a hostile member against a node's loops, in one life of many steps.

    python -m tests.fuzz.member --steps 10000 --seed 1

Chooses rules and values by a seeded random source of its own. Hypothesis plays the same rules in the tests, but keeps
every choice of an example to replay it, and its bound on those ends an example after some hundred steps. A failure
prints the last steps; the same seed repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import deque

from tests.fuzz.battle import Battle
from tests.fuzz.deeds import CHOICES, RULES
from tests.fuzz.world import quiet

SHOWN = 25


def play(steps: int, seed: int, *, quiet: bool = False) -> Battle:
    """A whole battle, closed. Raises what broke, after the last steps were printed."""
    rng = random.Random(seed)
    last: deque[str] = deque(maxlen=SHOWN)
    battle = Battle()
    try:
        battle.start()
        for number in range(1, steps + 1):
            name = rng.choice(CHOICES)
            last.append(f"{number} {name}")
            battle.step(RULES[name], rng)
            if not quiet and number % 500 == 0:
                sys.stdout.write(f"{number} steps, {battle.clock.steady_s - 1000:.0f} s of the node's time\n")
                sys.stdout.flush()
        battle.audit()
    except BaseException:
        sys.stdout.write("the last steps: " + ", ".join(last) + "\n")
        raise
    finally:
        battle.close()
    return battle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began_at = time.perf_counter()
    try:
        with quiet():
            battle = play(options.steps, options.seed)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    counters = battle.victim.parts.counters
    sys.stdout.write(
        f"{battle.num_steps} steps with seed {options.seed} in {time.perf_counter() - began_at:.0f} s, "
        f"{battle.clock.steady_s - 1000:.0f} s of the node's time, {battle.num_identities} hostile identities\n"
        f"rules: {dict(battle.done)}\nrefused: {dict(counters.refused)}\n"
        f"admitted: {battle.admitted[battle.honest.parts.context.peer_id]} of the honest member, "
        f"{sum(battle.admitted.values())} in all; the slowest honest one took {battle.longest_s:.2f} s\n"
    )


if __name__ == "__main__":
    main()
