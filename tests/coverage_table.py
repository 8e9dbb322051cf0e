"""Table of `make coverage`: lines and branches of each package in `make test`, and in both tiers together.

Child processes count too: nodes, workers, commands. A killed process writes no data, so the figures are lower bounds.
The last line is JSON. Data files stay in `.cache/coverage`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / ".cache" / "coverage"
# by `make` target, as in the Makefile
TIERS = {"test": "not scenario and not long", "test-all": "(scenario or vllm) and not long"}


@dataclass
class Covered:
    """Counts of lines and branches together."""

    covered: int = 0
    total: int = 0

    @property
    def percent(self) -> float:
        return 100 * self.covered / self.total if self.total else 100.0


def main() -> int:
    """Run both tiers and print the table. Return 1 if tests failed."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    failed = [name for name, markers in TIERS.items() if _run_tests(name, markers)]
    quick = _by_package(_combine("quick", "test"))
    whole = _by_package(_combine("whole", *TIERS))
    sys.stdout.write(f"{'package':<12} {'make test':>10} {'with test-all':>14}  lines and branches\n")
    for package, counts in sorted(whole.items()):
        sys.stdout.write(f"{package:<12} {quick[package].percent:>9.1f}% {counts.percent:>13.1f}%  {counts.total}\n")
    figures = {
        "make_test_percent": round(quick["all"].percent, 2),
        "whole_percent": round(whole["all"].percent, 2),
        "make_test_of_whole": round(quick["all"].covered / whole["all"].covered, 4),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return 1 if failed else 0


def _run_tests(name: str, markers: str) -> int:
    """Run a tier under coverage and return pytest's exit code."""
    pytest = ["pytest", "-q", "--numprocesses", os.environ.get("WORKERS", "logical"), "-m", markers]
    return _coverage(name, "run", "-m", *pytest).returncode


def _combine(name: str, *tiers: str) -> Path:
    """Combine the data of all processes of these tiers and return the file."""
    files = [str(path) for tier in tiers for path in DATA.glob(f"{tier}.*")]
    _coverage(name, "combine", "--keep", "--quiet", *files)
    return DATA / name


def _by_package(data: Path) -> dict[str, Covered]:
    """Return the counts of each package, and of all packages under `all`."""
    report = data.with_suffix(".json")
    _coverage(data.name, "json", "--quiet", "-o", str(report))
    counts: dict[str, Covered] = defaultdict(Covered)
    for file, entry in json.loads(report.read_bytes())["files"].items():
        parts, summary = Path(file).parts, entry["summary"]
        for package in (parts[1] if len(parts) > 2 else ".", "all"):
            counts[package].covered += summary["covered_lines"] + summary["covered_branches"]
            counts[package].total += summary["num_statements"] + summary["num_branches"]
    return counts


def _coverage(data: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "COVERAGE_FILE": str(DATA / data)}
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, env=environment, check=False)


if __name__ == "__main__":
    sys.exit(main())
