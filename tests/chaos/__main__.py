"""`python -m tests.chaos --seed 1 --minutes 60`: inject faults into a small real swarm until the time is over.

It prints one line per fault. The last line is `N faults, V violations`, and the exit code is 1 if V is above 0. A run
with a violation stays in `chaos-out/SEED-TIME/` with homes, logs and a report of each. `--table` prints the tables of
tests/chaos/README.md instead.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.faults import catalog as faults
from tests.chaos.invariants import checks as invariants
from tests.chaos.runner import Outcome, Runner
from tests.chaos.swarm import Swarm
from tests.trained_models import copy_trained_models

MAX_FAULTS = 1000
KEPT = Path("chaos-out")  # runs with a violation, by seed and time
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Start the swarm, run the schedule on it, print the results and return the number of violations."""
    known = faults.chosen(arguments.kinds.split(",") if arguments.kinds else ())
    outcomes: list[Outcome] = []
    models = copy_trained_models(folder / "models")
    swarm = Swarm(folder, models, vllm=arguments.vllm, roles=arguments.roles, num_nodes=arguments.nodes)
    with swarm.running():
        runner, started_at = Runner(swarm, known), time.monotonic()
        print_line(f"seed {arguments.seed}: {', '.join(f'{node.name} ({node.role})' for node in swarm.nodes)}")
        fitting = faults.fitting(known, swarm)
        print_line(f"not possible here: {', '.join(name for name, nodes in fitting.items() if not nodes) or 'none'}")
        planned = faults.first_by_node(arguments.faults, fitting, seed=arguments.seed)
        for outcome in runner.run_all(planned, stop_after_s=60 * arguments.minutes):
            outcomes.append(outcome)
            minutes, seconds = divmod(int(time.monotonic() - started_at), 60)
            print_line(f"{minutes:3}:{seconds:02} {outcome}")
        at_end = runner.end()
    counts = Counter(known[outcome.planned.fault].kind for outcome in outcomes)
    print_line("\n".join([*(f"at the end: VIOLATION {one}" for one in at_end), str(dict(counts))]))
    num_violations = len(at_end) + sum(len(outcome.violations) for outcome in outcomes)
    print_line(f"{len(outcomes)} faults, {num_violations} violations")
    return num_violations


def run_and_keep(arguments: argparse.Namespace) -> int:
    """Run in a temporary folder, keep it after a violation or an error, and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="chaos"))
    has_failed = True
    try:
        has_failed = bool(run(arguments, folder))
    finally:
        if has_failed or arguments.keep:
            kept = arguments.keep or KEPT / f"{arguments.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("run"), symlinks=True)  # sockets
            sys.stderr.write(f"kept in {kept}\n")
        shutil.rmtree(folder)
    return 1 if has_failed else 0


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments. Exits with code 2 if they are invalid."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the schedule")
    parser.add_argument("--minutes", type=float, default=5.0, help="time after which no new fault begins")
    parser.add_argument("--faults", type=int, default=MAX_FAULTS, help="largest number of faults")
    parser.add_argument("--kinds", default="", help="kinds or names of faults, separated by commas; default: all")
    parser.add_argument("--keep", type=Path, help="keep homes and logs in this new folder, with or without violations")
    parser.add_argument("--nodes", type=int, choices=(2, 3), default=3, help="number of nodes")
    parser.add_argument("--vllm", action="store_true", help="let the first node generate with vLLM")
    parser.add_argument("--roles", action="store_true", help="let one node only train and one only generate for it")
    parser.add_argument("--table", action="store_true", help="print the tables of faults and invariants, and end")
    arguments = parser.parse_args(words)
    if arguments.keep is not None and arguments.keep.exists():
        parser.error(f"--keep: {arguments.keep} exists: name a new folder")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.table:
        print_line(f"{faults.table()}\n\n{invariants.table()}")
        return 0
    os.environ.update(ONE_THREAD)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # so that no node remains running
    return run_and_keep(arguments)


if __name__ == "__main__":
    sys.exit(main())
