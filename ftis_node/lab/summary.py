"""From the results of trials to figures: curves as rows of a CSV file, means with standard errors as a table.

A *line* of an experiment is one model under one setting; its seeds are what means and errors are taken over. The
standard error is that of the mean over seeds, with n - 1 in the deviation; with one seed there is none.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from ftis_node.lab.grid import ALONE
from ftis_node.lab.pairs import COPY_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ftis_node.lab.trial_result import Evaluation, MemberResult, TrialResult

AXES = ("share", "delay", "nodes", "lie", "codec")  # beside pair and method
CSV_COLUMNS = (
    "pair", "method", "model", "seed", "step", "task",
    "pass_at_1", "reward_mean", "tokens_generated", "tokens_received",
)  # fmt: skip
PAYOFF_SHARE = 0.95  # of what `alone` reaches in the end


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and its standard error; `error` is None for one seed."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.error is None else f"{self.mean:.3f} ± {self.error:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error of at least one value."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error)


@dataclass(frozen=True, slots=True)
class Line:
    """One model under one setting. `seeds` holds a member's results for each seed; copies of a model stand together.

    Copies in one swarm are not independent, so they are averaged before anything is taken over seeds.
    """

    pair: str
    method: str
    model: str
    labels: dict[str, object]
    seeds: tuple[tuple[MemberResult, ...], ...]

    def estimate(self, value: Callable[[MemberResult], float]) -> Estimate:
        """Mean and error of a member's figure."""
        return estimate([fmean(value(member) for member in copies) for copies in self.seeds])

    def final(self, task: str) -> Estimate:
        """Accuracy at the last evaluation."""
        return self.estimate(lambda member: member.curve(task)[-1].pass_at_1)

    def along(self, task: str) -> Estimate:
        """Accuracy averaged over the evaluations after step 0: who learns sooner has more."""
        return self.estimate(lambda member: fmean(point.pass_at_1 for point in member.curve(task)[1:]))

    def curve(self, task: str) -> list[tuple[int, Estimate]]:
        """Accuracy by step."""
        steps = [point.step for point in self.seeds[0][0].curve(task)]
        return [(step, self.estimate(_accuracy_at(task, place))) for place, step in enumerate(steps)]

    def tokens(self, task: str) -> tuple[float, float]:
        """Tokens generated and received by the end, means over seeds."""
        generated = self.estimate(lambda member: member.curve(task)[-1].tokens_generated)
        return generated.mean, self.estimate(lambda member: member.curve(task)[-1].tokens_received).mean

    def kept(self) -> float | None:
        """Mean share of completions that the filter kept."""
        shares = [share for member in self.members() for share in member.steps["kept_fraction"] if share is not None]
        return fmean(shares) if shares else None

    def members(self) -> list[MemberResult]:
        """All results, seeds and copies alike."""
        return [member for copies in self.seeds for member in copies]


def _accuracy_at(task: str, place: int) -> Callable[[MemberResult], float]:
    return lambda member: member.curve(task)[place].pass_at_1


def varied_axes(results: Sequence[TrialResult]) -> list[str]:
    """The axes along which the swarms of an experiment differ."""
    swarms = [result.labels for result in results if result.labels["method"] != ALONE]
    return [axis for axis in AXES if len({str(labels[axis]) for labels in swarms}) > 1]


def method_label(labels: dict[str, object], axes: Sequence[str]) -> str:
    """The method, with its place on the axes that vary."""
    shown = [axis for axis in axes if labels["method"] != ALONE or axis == "delay"]
    return " ".join([str(labels["method"]), *(f"{axis}={labels[axis]}" for axis in shown)])


def lines_of(results: Sequence[TrialResult]) -> list[Line]:
    """The lines of an experiment, in the order of its trials."""
    axes = varied_axes(results)
    found: dict[tuple[str, str, str], dict[int, list[MemberResult]]] = {}
    labels: dict[tuple[str, str, str], dict[str, object]] = {}
    for result in results:
        for member in result.members:
            place = (
                str(result.labels["pair"]),
                method_label(result.labels, axes),
                member.name.split(COPY_MARK)[0],
            )
            labels.setdefault(place, result.labels)
            found.setdefault(place, defaultdict(list))[result.seed].append(member)
    return [Line(*place, labels[place], tuple(map(tuple, seeds.values()))) for place, seeds in found.items()]


def write_csv(results: Sequence[TrialResult], path: Path) -> None:
    """One row for every evaluation of every member."""
    axes = varied_axes(results)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for result in results:
            for member in result.members:
                name = (result.labels["pair"], method_label(result.labels, axes), member.name, result.seed)
                writer.writerows((*name, *_row(point)) for point in member.evaluations)


def _row(point: Evaluation) -> tuple[object, ...]:
    reward = "" if point.reward_mean is None else f"{point.reward_mean:.6f}"
    accuracy = f"{point.pass_at_1:.6f}"
    return point.step, point.task, accuracy, reward, point.tokens_generated, point.tokens_received


def tokens_until(member: MemberResult, task: str, accuracy: float) -> float | None:
    """Own tokens generated when a curve first reaches `accuracy`, between two evaluations in a straight line."""
    curve = member.curve(task)
    if curve[0].pass_at_1 >= accuracy:
        return 0.0
    for before, after in zip(curve, curve[1:], strict=False):
        if after.pass_at_1 >= accuracy:
            share = (accuracy - before.pass_at_1) / (after.pass_at_1 - before.pass_at_1)
            return before.tokens_generated + share * (after.tokens_generated - before.tokens_generated)
    return None


def payoff(lines: Sequence[Line], line: Line, task: str) -> Estimate | None:
    """Own tokens of a line until 95 % of `alone`'s final accuracy, as a share of what `alone` needs itself.

    None where there is no `alone` for this pair and model, it was there from the start, or a seed never gets there.
    """
    alone = next(
        (each for each in lines if each.pair == line.pair and each.model == line.model and is_alone(each)), None
    )
    if alone is None:
        return None
    goal = PAYOFF_SHARE * alone.final(task).mean
    by_alone = [tokens_until(member, task, goal) for member in alone.members()]
    reached_alone = [tokens for tokens in by_alone if tokens is not None]
    needed = {id(member): tokens_until(member, task, goal) for member in line.members()}
    if not reached_alone or None in needed.values() or fmean(reached_alone) == 0:
        return None
    return line.estimate(lambda member: (needed[id(member)] or 0.0) / fmean(reached_alone))


def is_alone(line: Line) -> bool:
    """Whether this line's node had no peers."""
    return line.labels["method"] == ALONE


def markdown_table(lines: Sequence[Line], tasks: Sequence[str]) -> str:
    """One row a line: accuracy at the end and along the way, tokens, and what the filter kept."""
    head = [
        "pair", "method", "model", *(f"{task}, end" for task in tasks), f"{tasks[0]}, mean of the curve",
        "generated", "received", "tokens to 95 % of alone", "kept", "seeds",
    ]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for line in lines:
        generated, received = line.tokens(tasks[0])
        share, kept = payoff(lines, line, tasks[0]), line.kept()
        rows.append(
            [
                line.pair,
                line.method,
                line.model,
                *(str(line.final(task)) for task in tasks),
                str(line.along(tasks[0])),
                f"{generated:,.0f}",
                f"{received:,.0f}",
                "-" if share is None else str(share),
                "-" if kept is None else f"{kept:.2f}",
                str(len(line.seeds)),
            ]
        )
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
