"""Metrics of the steps: all of them as a CSV file, and those that the papers show as a table of means.

They show what the filter kept, and how useful own and remote completions were (`algorithms/diagnostics.py` has the
formulas).
"""

from __future__ import annotations

import csv
from statistics import fmean
from typing import TYPE_CHECKING, Final

from ftis_node.lab.experiment.trial_result import SENDER_FIGURES, STEP_FIGURES
from ftis_node.lab.results.summary import final_accuracy, markdown, method_label, varied_axes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ftis_node.lab.experiment.trial_result import MemberResult, TrialResult
    from ftis_node.lab.results.summary import MethodResult

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
