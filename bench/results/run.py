"""`make results`: make the tables of docs/research/results.md again by `ftis-node compare`. The last line is JSON.

    python bench/results/run.py [TABLE ...] [--quick] [--out results-out] [--publish]

Quick: the first seed of each. What is made already in the folder is not made again. Tables share their tiny models.
`--publish` copies each table, its curves and its plots to docs/results/.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tables import TABLES  # the file beside this one

PUBLISHED = Path(__file__).parents[2] / "docs" / "results"
FILES = ("table.md", "curves.csv", "curves.png", "sweep.png", "methods.png")


def main() -> int:
    """Returns the exit code of the first command that failed, else 0."""
    parser = argparse.ArgumentParser(description="Makes the tables of docs/research/results.md again.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"default: all. {', '.join(TABLES)}")
    parser.add_argument("--quick", action="store_true", help="the first seed of each table")
    parser.add_argument("--out", type=Path, default=Path("results-out"))
    parser.add_argument("--publish", action="store_true", help="copy tables, curves and plots to docs/results/")
    options = parser.parse_args()
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"no table {min(unknown)!r}: use {', '.join(TABLES)}")
    seconds = {}
    for name in options.tables or TABLES:
        began = time.monotonic()
        out = options.out / name
        share_models(options.out, out)
        arguments = TABLES[name].arguments(str(out), quick=options.quick)
        sys.stdout.write(f"\n{name}: {TABLES[name].question}\n    ftis-node {' '.join(arguments)}\n")
        sys.stdout.flush()
        code = subprocess.run([sys.executable, "-m", "ftis_node", *arguments], check=False).returncode
        if code:
            return code
        seconds[name] = round(time.monotonic() - began, 1)
        if options.publish:
            _publish(name, out)
    figures = {"bench": "results", "quick": options.quick, "seconds": seconds}
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


def share_models(out: Path, table: Path) -> None:
    """Lets a table use the tiny models of the others: one with the same name is the same model."""
    models = out.resolve() / "models"
    models.mkdir(parents=True, exist_ok=True)
    table.mkdir(exist_ok=True)
    if not (table / "models").exists():
        (table / "models").symlink_to(models, target_is_directory=True)


def _publish(name: str, out: Path) -> None:
    PUBLISHED.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        if (out / file).exists():
            shutil.copy(out / file, PUBLISHED / f"{name}-{file}")


if __name__ == "__main__":
    sys.exit(main())
