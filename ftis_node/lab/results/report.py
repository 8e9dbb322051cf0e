"""Write the results of an experiment: results.json, CSV files, table.md and plots (docs/research/experiments.md)."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from ftis_node import __version__
from ftis_node.lab.experiment.provenance import made_by
from ftis_node.lab.results.baseline_comparison import controls_table
from ftis_node.lab.results.plots import plot_curves, plot_methods, plot_payoff, plot_steps, plot_sweep
from ftis_node.lab.results.step_metrics import steps_table, write_steps_csv
from ftis_node.lab.results.summary import markdown_table, series_of, write_csv
from ftis_node.tasks import load_task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ftis_node.lab.experiment.trial_matrix import Experiment
    from ftis_node.lab.experiment.trial_result import TrialResult

PACKAGES = ("torch", "transformers", "peft", "numpy")


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
