"""`python -m tests.chaos --seed 1 --minutes 60`: faults on a small real swarm until the time is over.

A line per fault as it comes; the last line is `N faults, V violations`, and the exit code 1 where V is above 0. Of such
a run homes, logs and the files' lines of each violation are kept in `chaos-out/SEED-TIME/` (`evidence.py`).
`--table` prints the table of faults for tests/chaos/README.md instead.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos import report, schedule
from tests.chaos.faults import catalog as faults
from tests.chaos.observing.evidence import Evidence, rotate
from tests.chaos.runner import Runner
from tests.chaos.swarm import Swarm
from tests.trained_models import copy_trained_models

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.runner import Outcome

MOST_FAULTS = 1000
KEPT = Path("chaos-out")  # by seed and time, what is kept of runs with a violation
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(arguments: argparse.Namespace, folder: Path, evidence: Evidence, say: Callable[[str], None]) -> str:
    """Makes the swarm and plays the schedule on it; returns the run's last line. Evidence says how much it found."""
    known = faults.chosen(arguments.kinds.split(",") if arguments.kinds else ())
    for name, why in faults.missing(known).items():
        say(f"left out: {name}: {why}")
    outcomes: list[Outcome] = []
    models = copy_trained_models(folder / "models")
    with Swarm.running(folder, models, vllm=arguments.vllm, roles=arguments.roles) as swarm:
        runner, started_at = Runner(swarm, known, evidence), time.monotonic()
        say(f"seed {arguments.seed}: {', '.join(f'{node.name} ({node.role})' for node in swarm.nodes)} in {folder}")
        planned = schedule.first(arguments.faults, faults.fitting(known, swarm), seed=arguments.seed)
        for outcome in runner.play_all(schedule.lanes(planned), stop_after_s=60 * arguments.minutes):
            outcomes.append(outcome)
            say("\n".join(report.lines_of(outcomes[-1], at_s=time.monotonic() - started_at)))
        at_end = runner.end()
    say("\n".join([*(f"at the end: VIOLATION {one}" for one in at_end), report.counts(outcomes)]))
    return report.last_line(outcomes, at_end)


def run_and_keep(arguments: argparse.Namespace) -> int:
    """A run in a folder of its own, of which is kept what tells of violations; returns the exit code.

    A run that the harness itself breaks off is kept, too. Raises what broke it.
    """
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        evidence = Evidence(Path(name))

        def tell(text: str) -> None:
            say(text)
            evidence.say(text)

        is_broken = False
        try:
            last_line = run(arguments, Path(name), evidence, tell)
            evidence.say(last_line)
        except Exception:
            is_broken = True
            raise
        finally:
            if arguments.keep is not None or evidence.num_looks or is_broken:
                say("\n".join(kept(arguments, evidence)))
        say(last_line)
    return 1 if evidence.num_looks else 0


def kept(arguments: argparse.Namespace, evidence: Evidence) -> list[str]:
    """Keeps what there is of a run where the arguments say so; in lines, where that is."""
    if arguments.keep is not None:
        return evidence.keep(arguments.keep.absolute())
    removed = rotate(KEPT) if KEPT.exists() else []
    return [*removed, *evidence.keep(KEPT.absolute() / f"{arguments.seed}-{time.strftime('%Y%m%d-%H%M%S')}")]


def say(text: str) -> None:
    """A line at once, for whoever watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's arguments; exits with code 2 where they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the schedule's; the same faults come in the same order")
    parser.add_argument("--minutes", type=float, default=5.0, help="no new fault after so long")
    parser.add_argument("--faults", type=int, default=MOST_FAULTS, help="no more than so many")
    parser.add_argument("--kinds", default="", help="kinds or names of faults, with commas between; default: all")
    parser.add_argument("--keep", type=Path, help="keep homes and logs in this new folder, whatever was found")
    parser.add_argument("--vllm", action="store_true", help="the first node generates by vLLM, its core a process")
    parser.add_argument("--roles", action="store_true", help="one node only trains, one only generates, for that one")
    parser.add_argument("--table", action="store_true", help="print the table of faults and end")
    arguments = parser.parse_args(words)
    if arguments.keep is not None and arguments.keep.exists():
        parser.error(f"--keep: {arguments.keep} is there already: name a new folder")
    return arguments


def main() -> int:
    """The command; returns its exit code."""
    arguments = parse()
    if arguments.table:
        say(report.table())
        return 0
    os.environ.update(ONE_THREAD)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))  # so that no node is left running
    return run_and_keep(arguments)


if __name__ == "__main__":
    sys.exit(main())
