"""Summarizes the results of trials: curves as rows of a CSV file, means with standard errors as a table.

A *line* of an experiment is one model under one setting. If there are several initial models, values are first averaged
over the other seeds of each model. Mean and standard error are then taken over the initial models. Otherwise they are
taken over the seeds of prompts and sampling. The binomial error of the test set has a separate column.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from ftis_node.lab.experiment.pairs import COPY_MARK, LATE_MARK
from ftis_node.lab.experiment.specs import ALONE, delay_alone, is_alone, parse_alone
from ftis_node.lab.experiment.trial_result import Evaluation, MemberResult, TrialResult

AXES = ("share", "delay", "nodes", "lie", "codec")  # besides pair and method
CSV_COLUMNS = (
    "pair", "method", "model", "seed", "step", "task",
    "pass_at_1", "reward_mean", "tokens_generated", "tokens_received",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and its standard error; `error` is None for one seed."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.error is None else f"{self.mean:.3f} ± {self.error:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error)


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One model under one setting. `runs` holds its results by (model seed, seed), one for each copy of the model.

    Copies in one swarm are not independent, so they are averaged before mean and error over seeds.
    """

    pair: str
    method: str
    model: str
    labels: dict[str, object]
    runs: Mapping[tuple[int, int], tuple[MemberResult, ...]]

    @property
    def alone(self) -> tuple[str, str, str]:
        """Return pair, model and delay of the baseline: the same model without peers."""
        return self.pair, self.model.removesuffix(LATE_MARK), delay_alone(str(self.labels["delay"]))

    def values(self, value: Callable[[MemberResult], float]) -> dict[tuple[int, int], float]:
        """Return a member's value by (model seed, seed), averaged over copies."""
        return {seeds: fmean(value(member) for member in copies) for seeds, copies in self.runs.items()}

    def estimate(self, value: Callable[[MemberResult], float]) -> Estimate:
        return estimate(over_seeds(self.values(value)))

    def final(self, task: str) -> Estimate:
        return self.estimate(final_accuracy(task))

    def along(self, task: str) -> Estimate:
        """Return the accuracy averaged over all evaluations after step 0. Faster learning gives a higher value."""
        return self.estimate(mean_accuracy(task))

    def test_error(self, task: str) -> float:
        """Return the binomial standard error of the final accuracy for the size of the test set."""
        accuracy = self.final(task).mean
        return math.sqrt(accuracy * (1 - accuracy) / self.members()[0].curve(task)[-1].n)

    def curve(self, task: str) -> list[tuple[int, Estimate]]:
        steps = [point.step for point in self.members()[0].curve(task)]
        return [(step, self.estimate(_accuracy_at(task, place))) for place, step in enumerate(steps)]

    def token_curve(self, task: str) -> list[tuple[float, Estimate]]:
        """Return the curve by the tokens generated until each evaluation, as means over the runs."""
        curves = [member.curve(task) for member in self.members()]
        tokens = [fmean(curve[place].tokens_generated for curve in curves) for place in range(len(curves[0]))]
        return list(zip(tokens, (accuracy for _, accuracy in self.curve(task)), strict=True))

    def step_means(self, figure: str) -> list[tuple[int, float]]:
        """Return a step metric as (step, mean) pairs; the mean is over all runs that recorded it at that step."""
        by_step: dict[int, list[float]] = defaultdict(list)
        for member in self.members():
            for place, value in enumerate(member.steps.get(figure, [])):
                if value is not None:
                    by_step[place + 1].append(value)
        return [(step, fmean(values)) for step, values in sorted(by_step.items())]

    def tokens(self, task: str) -> tuple[float, float]:
        generated = self.estimate(lambda member: member.curve(task)[-1].tokens_generated)
        return generated.mean, self.estimate(lambda member: member.curve(task)[-1].tokens_received).mean

    def kept(self) -> float | None:
        """Return the mean fraction of completions that the filter kept; None if no step recorded one."""
        shares = [share for member in self.members() for share in member.steps["kept_fraction"] if share is not None]
        return fmean(shares) if shares else None

    def is_one_policy(self, task: str) -> bool:
        """Return whether a swarm has copies of this model, and all copies of a run have the same curve."""
        curves = [[[point.pass_at_1 for point in each.curve(task)] for each in copies] for copies in self.runs.values()]
        return all(len(copies) > 1 and copies.count(copies[0]) == len(copies) for copies in curves)

    def members(self) -> list[MemberResult]:
        return [member for copies in self.runs.values() for member in copies]


def final_accuracy(task: str) -> Callable[[MemberResult], float]:
    """Return a function from a member's result to its accuracy at the last evaluation."""
    return lambda member: member.curve(task)[-1].pass_at_1


def mean_accuracy(task: str) -> Callable[[MemberResult], float]:
    """Return a function from a member's result to its mean accuracy over the evaluations after step 0."""
    return lambda member: fmean(point.pass_at_1 for point in member.curve(task)[1:])


def over_seeds(values: Mapping[tuple[int, int], float]) -> list[float]:
    """Return independent values from values by (model seed, seed): one per initial model if there are several."""
    by_model: dict[int, list[float]] = defaultdict(list)
    for (model_seed, _), value in values.items():
        by_model[model_seed].append(value)
    return [fmean(found) for found in by_model.values()] if len(by_model) > 1 else list(values.values())


def _accuracy_at(task: str, place: int) -> Callable[[MemberResult], float]:
    return lambda member: member.curve(task)[place].pass_at_1


def varied_axes(results: Sequence[TrialResult]) -> list[str]:
    """Return the axes along which the swarms and their controls differ; without swarms, those of the baselines."""
    labels = [result.labels for result in results]
    swarms = [each for each in labels if not is_alone(each["method"]) or parse_alone(each["method"]).own]
    return [axis for axis in AXES if len({str(each[axis]) for each in swarms or labels}) > 1]


def method_label(labels: dict[str, object], axes: Sequence[str]) -> str:
    method = str(labels["method"])
    if is_alone(method):  # a baseline depends on few of these axes
        axes = [axis for axis in axes if axis == "delay" or (parse_alone(method).own and axis in ("share", "nodes"))]
    return " ".join([method, *(f"{axis}={labels[axis]}" for axis in axes)])


def series_of(results: Sequence[TrialResult]) -> list[MethodResult]:
    """Return the lines of an experiment, in the order of its trials."""
    axes = varied_axes(results)
    found: dict[tuple[str, str, str], dict[tuple[int, int], list[MemberResult]]] = {}
    labels: dict[tuple[str, str, str], dict[str, object]] = {}
    for result in results:
        for member in result.members:
            place = (str(result.labels["pair"]), method_label(result.labels, axes), member.name.split(COPY_MARK)[0])
            labels.setdefault(place, result.labels)
            found.setdefault(place, defaultdict(list))[model_seed(result), result.seed].append(member)
    return [
        MethodResult(*place, labels[place], {seeds: tuple(members) for seeds, members in runs.items()})
        for place, runs in found.items()
    ]


def model_seed(result: TrialResult) -> int:
    """Return the seed of the trial's initial models; 0 if the labels do not have it."""
    return int(result.labels.get("model_seed", 0))


def members_of(results: Sequence[TrialResult]) -> Iterator[tuple[tuple[Any, ...], TrialResult, MemberResult]]:
    """Yield each member with its trial, after the first cells of its rows: pair, method, model, seed."""
    axes = varied_axes(results)
    for result in results:
        for member in result.members:
            cells = (result.labels["pair"], method_label(result.labels, axes), member.name, result.seed)
            yield cells, result, member


def write_csv(results: Sequence[TrialResult], path: Path) -> None:
    """Write one row for every evaluation of every member. The column `model_seed` appears only if there are several."""
    has_model_seeds = len({model_seed(result) for result in results}) > 1
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*CSV_COLUMNS, *(["model_seed"] if has_model_seeds else [])))
        for name, result, member in members_of(results):
            last = [model_seed(result)] if has_model_seeds else []
            writer.writerows((*name, *_row(point), *last) for point in member.evaluations)


def _row(point: Evaluation) -> tuple[object, ...]:
    reward = "" if point.reward_mean is None else f"{point.reward_mean:.6f}"
    accuracy = f"{point.pass_at_1:.6f}"
    return point.step, point.task, accuracy, reward, point.tokens_generated, point.tokens_received


def accuracy_at_tokens(member: MemberResult, task: str, tokens: float) -> float:
    """Return the accuracy of a curve when the member has generated this many own tokens, interpolated."""
    curve = member.curve(task)
    return float(np.interp(tokens, [point.tokens_generated for point in curve], [point.pass_at_1 for point in curve]))


def alone_line(lines: Sequence[MethodResult], line: MethodResult) -> MethodResult | None:
    """Return the line of the same model alone with whole updates, under the same delay if it exists; None without one.

    A delay of a peer alone does not delay the baseline.
    """
    pair, model, delay = line.alone
    found = [each for each in lines if (each.pair, each.model, each.labels["method"]) == (pair, model, ALONE)]
    return next((each for each in found if each.labels["delay"] == delay), found[0] if found else None)


def has_no_peers(line: MethodResult) -> bool:
    return is_alone(str(line.labels["method"]))


def markdown_table(lines: Sequence[MethodResult], tasks: Sequence[str]) -> str:
    """Return one row per line: final and mean accuracy, tokens, and the fraction of kept completions."""
    head = [
        "pair", "method", "model", *(f"{task}, end" for task in tasks), "test set ±", f"{tasks[0]}, mean of the curve",
        "generated", "received", "kept", "runs",
    ]  # fmt: skip
    rows = []
    for line in lines:
        generated, received = line.tokens(tasks[0])
        kept = line.kept()
        rows.append(
            [
                line.pair,
                line.method,
                line.model,
                *(str(line.final(task)) for task in tasks),
                f"{line.test_error(tasks[0]):.3f}",
                str(line.along(tasks[0])),
                f"{generated:,.0f}",
                f"{received:,.0f}",
                "-" if kept is None else f"{kept:.2f}",
                str(len(line.runs)),
            ]
        )
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"
