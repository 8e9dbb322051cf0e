"""Compares a node of a swarm with the same model without peers: the benefit of sharing at equal own generation.

The control is the best of the lines that generate as much as the node itself (`alone:own`, with one or several updates
per batch). With such a control, more optimizer steps alone cannot explain the gain. Differences are paired: both lines
have the same initial model, prompts and seeds in each run. The interval is Student's, over the same values as the error
of the mean.

*Worth of a remote group*: the gain from a peer's group, relative to the gain from one more own group. It is the gain in
mean accuracy over `alone:own`, divided by the gain of `alone`, which generates as many groups itself. At 1 both are
worth the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ftis_node.lab.experiment.rounds import ALONE, CONTROLS, is_alone, parse_alone
from ftis_node.lab.results.summary import (
    alone_line,
    estimate,
    final_accuracy,
    has_no_peers,
    markdown,
    mean_accuracy,
    over_seeds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftis_node.lab.experiment.trial_result import MemberResult
    from ftis_node.lab.results.summary import MethodResult

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
    if not shared:
        return None
    return interval(over_seeds(shared))


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


def controls_table(lines: Sequence[MethodResult], task: str) -> str:
    """Return one row for each node of a swarm beside its best control; empty if no control was run."""
    head = ["pair", "method", "model", "better control", "end, difference", "mean of the curve, difference", "worth"]
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
            ]
        )
    return markdown([head, ["---"] * len(head), *rows]) if rows else ""


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
