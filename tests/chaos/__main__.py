"""`python -m tests.chaos --seed 1 --minutes 60`: inject faults into a small real swarm until the time is over.

It prints one line per fault. The last line is `N faults, V violations`, and the exit code is 1 if V is above 0. A run
with a violation stays in `chaos-out/SEED-TIME/` with homes, logs and the relevant lines (observation/evidence.py).
`--table` prints the tables of tests/chaos/README.md instead.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos import report, schedule
from tests.chaos.faults import catalog as faults
from tests.chaos.invariants import checks as invariants
from tests.chaos.observation.evidence import Evidence, remove_oldest
from tests.chaos.runner import Outcome, Runner
from tests.chaos.swarm import Swarm
from tests.trained_models import copy_trained_models

MAX_FAULTS = 1000
KEPT = Path("chaos-out")  # runs with a violation, by seed and time
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(arguments: argparse.Namespace, folder: Path, evidence: Evidence, log: Callable[[str], None]) -> str:
    """Start the swarm, run the schedule on it and return the last line. `evidence` counts the violations."""
    known = faults.chosen(arguments.kinds.split(",") if arguments.kinds else ())
    for name, reason in faults.missing(known).items():
        log(f"left out: {name}: {reason}")
    outcomes: list[Outcome] = []
    models = copy_trained_models(folder / "models")
    with Swarm.running(folder, models, vllm=arguments.vllm, roles=arguments.roles) as swarm:
        runner, started_at = Runner(swarm, known, evidence), time.monotonic()
        log(f"seed {arguments.seed}: {', '.join(f'{node.name} ({node.role})' for node in swarm.nodes)} in {folder}")
        planned = schedule.first(arguments.faults, faults.fitting(known, swarm), seed=arguments.seed)
        for outcome in runner.run_all(schedule.by_node(planned), stop_after_s=60 * arguments.minutes):
            outcomes.append(outcome)
            log("\n".join(report.lines_of(outcomes[-1], at_s=time.monotonic() - started_at)))
        at_end = runner.end()
    log("\n".join([*(f"at the end: VIOLATION {one}" for one in at_end), report.counts(outcomes)]))
    return report.last_line(outcomes, at_end)


def run_and_keep(arguments: argparse.Namespace) -> int:
    """Run in a temporary folder, keep a run with a violation, and return the exit code.

    A run that an error of the harness ends is kept too. Raises that error.
    """
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        evidence = Evidence(Path(name))

        def log(text: str) -> None:
            print_line(text)
            evidence.log(text)

        has_failed = False
        try:
            last_line = run(arguments, Path(name), evidence, log)
            evidence.log(last_line)
        except Exception:
            has_failed = True
            raise
        finally:
            if arguments.keep is not None or evidence.num_records or has_failed:
                print_line("\n".join(kept(arguments, evidence)))
        print_line(last_line)
    return 1 if evidence.num_records else 0


def kept(arguments: argparse.Namespace, evidence: Evidence) -> list[str]:
    """Copy the evidence to the folder that the arguments name, and return lines that report it."""
    if arguments.keep is not None:
        return evidence.keep(arguments.keep.absolute())
    removed = remove_oldest(KEPT) if KEPT.exists() else []
    return [*removed, *evidence.keep(KEPT.absolute() / f"{arguments.seed}-{time.strftime('%Y%m%d-%H%M%S')}")]


def print_line(text: str) -> None:
    """Print a line and flush the output."""
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
    parser.add_argument("--vllm", action="store_true", help="let the first node generate with vLLM")
    parser.add_argument("--roles", action="store_true", help="let one node only train and one only generate for it")
    parser.add_argument("--table", action="store_true", help="print the tables of faults and invariants, and end")
    arguments = parser.parse_args(words)
    if arguments.keep is not None and arguments.keep.exists():
        parser.error(f"--keep: {arguments.keep} exists: name a new folder")
    return arguments


def main() -> int:
    """Run the command and return its exit code."""
    arguments = parse()
    if arguments.table:
        print_line(f"{report.table()}\n\n{invariants.table()}")
        return 0
    os.environ.update(ONE_THREAD)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # so that no node remains running
    return run_and_keep(arguments)


if __name__ == "__main__":
    sys.exit(main())
