"""Write the results of an experiment: results.json, CSV files, table.md and plots (docs/research/experiments.md).

Metrics of the steps: all of them as a CSV file, and those that the papers show as a table of means.

They show what the filter kept, and how useful own and remote completions were (`algorithms/diagnostics.py` has the
formulas).
"""

from __future__ import annotations

import csv
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ftis_node import __version__
from ftis_node.lab.experiment.trial_result import SENDER_FIGURES, STEP_FIGURES, made_by
from ftis_node.lab.results.baseline_comparison import controls_table
from ftis_node.lab.results.plots import plot_curves, plot_methods, plot_payoff, plot_steps, plot_sweep
from ftis_node.lab.results.summary import (
    final_accuracy,
    markdown,
    markdown_table,
    method_label,
    series_of,
    varied_axes,
    write_csv,
)
from ftis_node.tasks import load_task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ftis_node.lab.experiment.trial_matrix import Experiment
    from ftis_node.lab.experiment.trial_result import MemberResult, TrialResult
    from ftis_node.lab.results.summary import MethodResult

PACKAGES = ("torch", "transformers", "peft", "numpy")
FIGURES = (*STEP_FIGURES, *SENDER_FIGURES)
IN_THE_TABLE: Final = {
    "own_signal": "own groups with signal",
    "foreign_signal": "foreign groups with signal",
    "foreign_kept_negatives": "foreign negatives kept",
    "foreign_mean_kl": "KL to senders",
    "foreign_ess": "effective sample size",
    "foreign_weight_variance": "variance of weights",
    "foreign_clipped": "clipped",
    "entropy": "entropy",
}
STEP_COLUMNS = ("pair", "method", "model", "seed", "step", *FIGURES)


def write_steps_csv(results: Sequence[TrialResult], path: Path) -> None:
    """Write one row for every step of every member. The cell of an unknown metric is empty."""
    axes = varied_axes(results)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(STEP_COLUMNS)
        for result in results:
            for member in result.members:
                name = (result.labels["pair"], method_label(result.labels, axes), member.name, result.seed)
                for place in range(max(map(len, member.steps.values()), default=0)):
                    writer.writerow((*name, place + 1, *(_cell(member, figure, place) for figure in FIGURES)))


def _cell(member: MemberResult, figure: str, place: int) -> str:
    """Return the metric as text; "" if it is unknown. Results of older versions lack some metrics."""
    values = member.steps.get(figure)
    value = None if values is None else values[place]
    return "" if value is None else f"{value:.6g}"


def steps_table(lines: Sequence[MethodResult], task: str) -> str:
    """Return one row per line: best minus final accuracy, and means of metrics over all steps and runs."""
    head = ["pair", "method", "model", "best less end", *IN_THE_TABLE.values()]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        means = {figure: [value for _, value in line.step_means(figure)] for figure in IN_THE_TABLE}
        rows.append(
            [
                *(line.pair, line.method, line.model),
                str(line.estimate(_below_best(task))),
                *(f"{fmean(values):.3g}" if values else "-" for values in means.values()),
            ]
        )
    return markdown(rows)


def _below_best(task: str) -> Callable[[MemberResult], float]:
    end = final_accuracy(task)
    return lambda member: max(point.pass_at_1 for point in member.curve(task)) - end(member)


def write_report(experiment: Experiment, results: Sequence[TrialResult], out: Path) -> str:
    """Write all files into the folder `out`. Return the tables for the screen, without the step metrics."""
    tasks = [load_task(spec, split="test").name for spec in experiment.eval_specs]
    lines = series_of(results)
    accuracies, differences = markdown_table(lines, tasks), controls_table(lines, tasks[0])
    shown = [accuracies, differences, provenance(results)]
    (out / "table.md").write_text("\n".join(filter(None, [*shown[:-1], steps_table(lines, tasks[0]), shown[-1]])))
    (out / "results.json").write_bytes(document(experiment, results))
    write_csv(results, out / "curves.csv")
    write_steps_csv(results, out / "steps.csv")
    plot_curves(lines, tasks[0], out / "curves.png")
    plot_methods(lines, tasks[0], out / "methods.png")
    plot_sweep(lines, results, tasks[0], out / "sweep.png")
    plot_steps(lines, out / "steps.png")
    plot_payoff(lines, results, tasks[0], out / "payoff.png")
    return "\n".join(filter(None, shown))


def provenance(results: Sequence[TrialResult]) -> str:
    """Return one line for each version of the code that made trials."""
    return "".join(f"Made by {code}.\n" for code in dict.fromkeys(result.made_by for result in results) if code)


def document(experiment: Experiment, results: Sequence[TrialResult]) -> bytes:
    """Return the content of `results.json`."""
    found = {"schema": 1, "settings": _settings(experiment), "machine": _machine(), "trials": list(results)}
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def _settings(experiment: Experiment) -> dict[str, Any]:
    return {
        "manifest": experiment.base.model_dump(mode="json", exclude_none=True),
        "pairs": [asdict(pair) for pair in experiment.pairs],
        "methods": experiment.all_methods,
        "task": experiment.task_spec,
        "evaluated": experiment.eval_specs,
        "steps": experiment.steps,
        "seeds": list(experiment.seeds),
        "shares": experiment.shares,
        "delays": experiment.delays,
        "nodes": experiment.num_nodes,
        "lies": experiment.lies,
        "liars": experiment.num_liars,
        "codecs": experiment.codecs,
        "lora_adapter": experiment.lora_adapter.model_dump(),
        "completions_per_update": experiment.completions_per_update,
    }


def _machine() -> dict[str, Any]:
    return {
        "ftis_node": __version__,
        "made_by": made_by(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{package: version(package) for package in PACKAGES},
    }
