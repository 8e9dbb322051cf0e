"""Write the results of an experiment: results.json, CSV files, table.md and plots (docs/research/experiments.md).

`algorithms/diagnostics.py` has the formulas of the steps' metrics. A node of a swarm is compared with the best control.
Differences are paired: both lines have the same initial model, prompts and seeds in each run. The interval is
Student's, over the same values as the error of the mean.
"""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from ftis_node import __version__
from ftis_node.lab.experiment.plots import plot_curves, plot_methods, plot_sweep
from ftis_node.lab.experiment.specs import ALONE, CONTROLS, is_alone, parse_alone
from ftis_node.lab.experiment.summary import (
    MethodResult,
    accuracy_at_tokens,
    alone_line,
    estimate,
    final_accuracy,
    has_no_peers,
    markdown,
    markdown_table,
    mean_accuracy,
    members_of,
    over_seeds,
    series_of,
    write_csv,
)
from ftis_node.lab.experiment.trial_matrix import Experiment
from ftis_node.lab.experiment.trial_result import SENDER_FIGURES, STEP_FIGURES, MemberResult, TrialResult, made_by
from ftis_node.tasks import load_task

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
# The 97.5 % points of Student's t with 1 to 30 degrees of freedom; beyond, the normal distribution's.
STUDENT: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL: Final = 1.960
SMALLEST_GAIN: Final = 0.005  # gain of `alone` over `alone:own`; with less, the worth is a ratio of two noises


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of paired differences, its standard error and 95 % interval. Error and interval are None for one value."""

    mean: float
    error: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} ± {self.error:.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def paired_difference(
    line: MethodResult, other: MethodResult, value: Callable[[MemberResult], float]
) -> PairedDifference | None:
    """Return `line` minus `other` over the runs that both have; None if they have none in common."""
    ours, theirs = line.values(value), other.values(value)
    shared = {seeds: ours[seeds] - theirs[seeds] for seeds in ours if seeds in theirs}
    return interval(over_seeds(shared)) if shared else None


def interval(differences: Sequence[float]) -> PairedDifference:
    """Return the mean of at least one difference, with Student's 95 % interval."""
    found = estimate(differences)
    if found.error is None:
        return PairedDifference(found.mean, None, None, None)
    freedom = len(differences) - 1
    reach = found.error * (STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL)
    return PairedDifference(found.mean, found.error, found.mean - reach, found.mean + reach)


def best_control(lines: Sequence[MethodResult], line: MethodResult, task: str) -> MethodResult | None:
    """Return the control with the highest final accuracy and as much own generation as this line; None without one."""
    found = [each for each in lines if _is_control_of(each, line)]
    return max(found, key=lambda each: each.final(task).mean, default=None)


def worth(lines: Sequence[MethodResult], line: MethodResult, task: str) -> float | None:
    """Return the worth of a remote group in own groups; None without a control, or if more own groups gain nothing."""
    whole = alone_line(lines, line)
    own = next((each for each in lines if _is_control_of(each, line) and _method(each) == CONTROLS[0]), None)
    if whole is None or own is None or has_no_peers(line):
        return None
    curve = mean_accuracy(task)
    gained, could = (paired_difference(each, own, curve) for each in (line, whole))
    return None if gained is None or could is None or could.mean < SMALLEST_GAIN else gained.mean / could.mean


def at_equal_tokens(lines: Sequence[MethodResult], line: MethodResult, task: str) -> PairedDifference | None:
    """Return the end of `line` minus `alone` at the same own tokens, which are larger batches there; None without."""
    if (whole := alone_line(lines, line)) is None:
        return None
    tokens = line.values(lambda member: member.curve(task)[-1].tokens_generated)
    ends = line.values(final_accuracy(task))
    shared = {
        seeds: ends[seeds] - fmean(accuracy_at_tokens(member, task, tokens[seeds]) for member in members)
        for seeds, members in whole.runs.items()
        if seeds in ends
    }
    return interval(over_seeds(shared)) if shared else None


def copies_note(lines: Sequence[MethodResult], task: str) -> str:
    """Return a list of the nodes of a swarm that are one policy; empty if there are none."""
    found = "".join(f"- {line.pair} {line.method} {line.model}\n" for line in lines if line.is_one_policy(task))
    return f"All copies have the same curve, so they are one policy:\n\n{found}" if found else ""


def controls_table(lines: Sequence[MethodResult], task: str) -> str:
    """Return one row for each node of a swarm beside its best control; empty if no control was run."""
    head = [
        *("pair", "method", "model", "better control", "end, difference", "mean of the curve, difference", "worth"),
        "end less alone at equal own tokens",
    ]
    rows = []
    for line in lines:
        control = None if has_no_peers(line) else best_control(lines, line, task)
        if control is None:
            continue
        value = worth(lines, line, task)
        rows.append(
            [
                *(line.pair, line.method, line.model, control.method),
                *(str(paired_difference(line, control, each(task))) for each in (final_accuracy, mean_accuracy)),
                "-" if value is None else f"{value:.2f}",
                str(at_equal_tokens(lines, line, task) or "-"),
            ]
        )
    return markdown(head, rows) if rows else ""


def _is_control_of(each: MethodResult, line: MethodResult) -> bool:
    method = _method(each)
    if not is_alone(method) or method == ALONE or not parse_alone(method).own:
        return False
    axes = ("share", "nodes")
    return (each.pair, each.model, each.labels["delay"]) == line.alone and all(
        each.labels[axis] == line.labels[axis] for axis in axes
    )


def _method(line: MethodResult) -> str:
    return str(line.labels["method"])


def write_steps_csv(results: Sequence[TrialResult], path: Path) -> None:
    """Write one row for every step of every member. The cell of an unknown metric is empty."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(STEP_COLUMNS)
        for name, _, member in members_of(results):
            for place in range(max(map(len, member.steps.values()), default=0)):
                values = (member.steps[figure][place] for figure in FIGURES)
                cells = ("" if value is None else f"{value:.6g}" for value in values)
                writer.writerow((*name, place + 1, *cells))


def steps_table(lines: Sequence[MethodResult], task: str) -> str:
    """Return one row per line: best minus final accuracy, and means of metrics over all steps and runs."""
    head = ["pair", "method", "model", "best less end", *IN_THE_TABLE.values()]
    end, rows = final_accuracy(task), []
    for line in lines:
        means = {figure: [value for _, value in line.step_means(figure)] for figure in IN_THE_TABLE}
        rows.append(
            [
                *(line.pair, line.method, line.model),
                str(line.estimate(lambda member: max(point.pass_at_1 for point in member.curve(task)) - end(member))),
                *(f"{fmean(values):.3g}" if values else "-" for values in means.values()),
            ]
        )
    return markdown(head, rows)


def write_report(experiment: Experiment, results: Sequence[TrialResult], out: Path) -> str:
    """Write all files into the folder `out`. Return the tables for the screen, without the step metrics."""
    tasks = [load_task(spec, split="test").name for spec in experiment.eval_specs]
    lines = series_of(results)
    accuracies, differences = markdown_table(lines, tasks), controls_table(lines, tasks[0])
    shown = [accuracies, differences, copies_note(lines, tasks[0]), provenance(results)]
    (out / "table.md").write_text("\n".join(filter(None, [*shown[:-1], steps_table(lines, tasks[0]), shown[-1]])))
    (out / "results.json").write_bytes(document(experiment, results))
    write_csv(results, out / "curves.csv")
    write_steps_csv(results, out / "steps.csv")
    plot_curves(lines, tasks[0], out / "curves.png")
    plot_curves(lines, tasks[0], out / "tokens.png", by_tokens=True)
    plot_methods(lines, tasks[0], out / "methods.png")
    plot_sweep(lines, results, tasks[0], out / "sweep.png")
    return "\n".join(filter(None, shown))


def provenance(results: Sequence[TrialResult]) -> str:
    """Return one line for each version of the code that made trials."""
    return "".join(f"Made by {code}.\n" for code in dict.fromkeys(result.made_by for result in results) if code)


def document(experiment: Experiment, results: Sequence[TrialResult]) -> bytes:
    found = {"schema": 1, "settings": experiment, "machine": _machine(), "trials": list(results)}
    return msgspec.json.format(msgspec.json.encode(found, enc_hook=_plain), indent=1) + b"\n"


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else list(value)


def _machine() -> dict[str, Any]:
    return {
        "ftis_node": __version__,
        "made_by": made_by(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{package: version(package) for package in PACKAGES},
    }
