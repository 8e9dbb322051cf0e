"""Paired differences between two methods of a published table, by model, from its curves. The last line is JSON.

    python bench/results/paired.py docs/results/filters-late-curves.csv --base METHOD --method METHOD

Each row is `--method` minus `--base`: the end, the mean of the curve after step 0, and the end at equal own tokens. For
the last, the curve of `--base` is interpolated. Runs are paired by seed. Seeds and copies of one starting model count
as one value, their mean, and their spread is printed. The interval is Student's at 95 %. `--base-curves` names the
curves of another table with the same models, such as that of another learning rate.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ftis_node.lab.experiment.report import interval

Curve = list[tuple[int, float, int]]  # step, accuracy, own tokens so far


def main() -> None:
    parser = argparse.ArgumentParser(description="Paired differences between two methods of a table.")
    parser.add_argument("curves", type=Path, help="curves.csv of `ftis-node compare`")
    parser.add_argument("--base", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--base-curves", type=Path, help="curves.csv with --base; by default the same file")
    options = parser.parse_args()
    curves, bases = read_curves(options.curves), read_curves(options.base_curves or options.curves)
    for known, method in ((bases, options.base), (curves, options.method)):
        methods = sorted({method for _, _, method in known})
        if method not in methods:
            parser.error(f"no curve of the method {method}; there are those of {', '.join(methods)}")
    found = {}
    for pair, model in sorted({(pair, model) for pair, model, _ in curves}):
        base, other = bases.get((pair, model, options.base), {}), curves.get((pair, model, options.method), {})
        shared = sorted(base.keys() & other.keys())
        if not shared:
            continue
        for name, value in (("end", final), ("mean", mean), ("end at equal own tokens", by_tokens)):
            by_model: dict[str, list[float]] = defaultdict(list)
            for model_seed, seed in shared:
                by_model[model_seed].append(value(other[model_seed, seed], base[model_seed, seed]))
            difference = interval([statistics.fmean(values) for values in by_model.values()])
            spread = spread_of_seeds(list(by_model.values()))
            sys.stdout.write(f"{pair} {model}, {name}: {difference}; seeds of one model: {spread}\n")
            found[f"{pair}/{model}/{name}"] = asdict(difference) | {"spread_of_seeds": spread}
    document = {"bench": "paired", "base": options.base, "method": options.method, "differences": found}
    sys.stdout.write(json.dumps(document) + "\n")


def read_curves(path: Path) -> dict[tuple[str, str, str], dict[tuple[str, str], Curve]]:
    """Return the curves by pair with task, model and method, then by seed of the starting model, and run and copy."""
    curves: dict[tuple[str, str, str], dict[tuple[str, str], Curve]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            model, _, copy = row["model"].partition("~")
            seeds = (row.get("model_seed", ""), f"{row['seed']}~{copy}")
            point = (int(row["step"]), float(row["pass_at_1"]), int(row["tokens_generated"]))
            curves[f"{row['pair']} {row['task']}", model, row["method"]][seeds].append(point)
    return curves


def spread_of_seeds(by_model: list[list[float]]) -> float | None:
    """Return the standard deviation of the differences of one starting model, pooled; None with one run of each."""
    if any(len(values) < 2 for values in by_model):
        return None
    return round(math.sqrt(statistics.fmean(map(statistics.variance, by_model))), 4)


def final(curve: Curve, base: Curve) -> float:
    """Return the difference of the last accuracies."""
    return max(curve)[1] - max(base)[1]


def mean(curve: Curve, base: Curve) -> float:
    """Return the difference of the mean accuracies after step 0."""
    means = [statistics.fmean(accuracy for step, accuracy, _ in each if step > 0) for each in (curve, base)]
    return means[0] - means[1]


def by_tokens(curve: Curve, base: Curve) -> float:
    """Return the last accuracy minus that of `base` after as many own tokens, or its last if it has fewer."""
    _, accuracy, tokens = max(curve)
    _, accuracies, own = zip(*sorted(base), strict=True)
    return accuracy - float(np.interp(tokens, own, accuracies))


if __name__ == "__main__":
    main()
