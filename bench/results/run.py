"""`make results`, `make results-llm`: make the tables of docs/research with `ftis-node compare`. The last line is JSON.

    python bench/results/run.py [TABLE ...] [--quick] [--jobs N] [--out results-out] [--publish]

Tables run in parallel, `--jobs` of them, by default one per core; a lone table runs as many trials. The models that
they share are made first. Results that exist in the folder are not made again. A table's output is in `logs`.

Quick: the first seed of each table, and of the widest tables a part of the methods or delays (`tables.py`).
`--publish` copies each table, its curves and its plots to docs/results/. A trial of a language model takes up to an
hour. So with `--llm --publish` its result is copied, too, also from a run that is interrupted, and later runs do not
repeat it.

JSON: `wall_s` of the run, `seconds` of each table, and `processor_s` of each table's trials.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tables import LLM_TABLES, TABLES  # in this folder

from ftis_node.lab.child_processes import ChildProcess, ChildProcesses, children
from ftis_node.lab.experiment.pairs import make_models, tiny_models

PUBLISHED = Path(__file__).parents[2] / "docs" / "results"
FILES = ("table.md", "curves.csv", "curves.png", "sweep.png", "methods.png", "arms.png")
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Running:
    """A running command that makes a table."""

    name: str
    child: ChildProcess
    began: float


def main() -> int:
    """Return 0, or the exit code of the first command that failed."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and stops the commands
    began = time.monotonic()
    names = options.tables
    make_all_models(names, options)
    seconds: dict[str, float] = {}
    with children(options.out / "logs") as commands, _kept_trials(names, options):
        waiting, running = list(names), list[Running]()
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(_start(commands, waiting.pop(0), options))
            time.sleep(POLL_S)
            for table in [each for each in running if each.child.exit_code is not None]:
                running.remove(table)
                seconds[table.name] = round(time.monotonic() - table.began, 1)
                if code := _end(table, options):
                    return code
    figures = {
        "bench": "results",
        "quick": options.quick,
        "jobs": options.jobs,
        "wall_s": round(time.monotonic() - began, 1),
        "seconds": seconds,
        "processor_s": {name: processor_seconds(options.out / name) for name in names},
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


@contextmanager
def _kept_trials(names: list[str], options: argparse.Namespace) -> Iterator[None]:
    """Begin with the published trials of language models, and publish the new ones at the end, also after an error."""
    folders = [(PUBLISHED / f"{name}-trials", options.out / name / "runs") for name in names if options.llm]
    for published, trials in folders:
        _copy_missing(published, trials)
    try:
        yield
    finally:
        if options.publish:
            for published, trials in folders:
                _copy_missing(trials, published)


def _copy_missing(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        if not (target / file.name).exists():
            shutil.copy(file, target)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the tables of docs/research/tiny-models.md again.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"default: all. {', '.join(TABLES)}")
    parser.add_argument("--llm", action="store_true", help=f"the tables of language models: {', '.join(LLM_TABLES)}")
    parser.add_argument("--quick", action="store_true", help="the first seed of each table, and a part of the widest")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="tables at a time")
    parser.add_argument("--out", type=Path, default=Path("results-out"))
    parser.add_argument("--publish", action="store_true", help="copy tables, curves and plots to docs/results/")
    options = parser.parse_args()
    options.known = LLM_TABLES if options.llm else TABLES
    options.tables = options.tables or list(options.known)
    if unknown := set(options.tables) - set(options.known):
        parser.error(f"no table {min(unknown)!r}: use {', '.join(options.known)}")
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.quick and options.publish:
        parser.error("--quick makes parts of tables, which are not published: leave out one of the two")
    return options


def make_all_models(names: list[str], options: argparse.Namespace) -> None:
    """Make the models of these tables that are missing, so that no two tables make the same one."""
    models = options.out / "models"
    models.mkdir(parents=True, exist_ok=True)
    if options.llm:
        from language_models import make_missing  # with torch, which tiny models do not need here

        make_missing(models, seeds=max(LLM_TABLES[name].num_model_seeds(quick=options.quick) for name in names))
        return
    specs = {
        model: how
        for name in names
        for seed in range(TABLES[name].num_model_seeds(quick=options.quick))
        for model, how in tiny_models(TABLES[name].pairs, seed=seed).items()
    }
    sys.stdout.write(f"{len(specs)} tiny models\n")
    sys.stdout.flush()
    make_models(specs, models, watch=lambda fraction, what: None, jobs=options.jobs)


def _start(commands: ChildProcesses, name: str, options: argparse.Namespace) -> Running:
    share_models(options.out, options.out / name)
    table = options.known[name]
    arguments = table.arguments(str(options.out / name), quick=options.quick)
    sys.stdout.write(f"\n{name}: {table.question}\n    ftis-node {' '.join(arguments)}\n")
    sys.stdout.flush()
    jobs = max(1, options.jobs // len(options.tables))
    return Running(name, commands.start(name, *arguments, "--jobs", str(jobs)), time.monotonic())


def _end(table: Running, options: argparse.Namespace) -> int:
    """Print and publish a finished table. Return the exit code of its command."""
    code = table.child.exit_code or 0
    if code:
        sys.stderr.write(f"{table.name} failed with exit code {code}: {table.child.last_words()}\n")
        return code
    sys.stdout.write(f"\n{table.name}:\n{table.child.out.read_text()}")
    sys.stdout.flush()
    if options.publish:
        _publish(table.name, options.out / table.name)
    return 0


def processor_seconds(table: Path) -> float:
    """Return the processor time of a table's trials, which other programs of the machine hardly change."""
    trials = json.loads((table / "results.json").read_bytes())["trials"]
    return round(sum(trial["processor_seconds"] for trial in trials), 1)


def share_models(out: Path, table: Path) -> None:
    """Let a table use the tiny models of the others: one with the same name is the same model."""
    models = out.resolve() / "models"
    models.mkdir(parents=True, exist_ok=True)
    table.mkdir(parents=True, exist_ok=True)
    if not (table / "models").exists():
        (table / "models").symlink_to(models, target_is_directory=True)


def _publish(name: str, out: Path) -> None:
    PUBLISHED.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        if (out / file).exists():
            shutil.copy(out / file, PUBLISHED / f"{name}-{file}")


if __name__ == "__main__":
    sys.exit(main())
