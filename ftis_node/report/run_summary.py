"""Head of the page: the main values, a summary in sentences, and the steps in about ten rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.report.formatting import clean, large, length, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftis_node.report.facts import RunFacts
    from ftis_node.telemetry.history import EvaluationPoint, StepPoint

NUM_LAST_STEPS = 10
NUM_ROWS = 10


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline value."""

    label: str
    value: str
    under: str


@dataclass(frozen=True, slots=True)
class StepRow:
    """Consecutive steps in one row: their means, and the sums of groups and tokens."""

    steps: str
    reward: float | None
    loss: float | None
    kept: float | None
    truncated: float | None
    mean_kl: float | None
    own_groups: int
    foreign_groups: int
    num_tokens: int
    duration_s: float
    without_change: int


def tiles(facts: RunFacts) -> list[Tile]:
    """Return the main values."""
    steps = facts.history.steps
    own, foreign = groups_used(steps)
    refused = sum(facts.event_totals.refused.values())
    tokens = facts.event_totals.tokens
    shown = [Tile("Steps", f"{steps[-1].step:,}" if steps else "0", _time_a_step(steps))]
    shown += [_accuracy_tile(points) for points in by_task(facts)[:2]]
    if (reward := mean(point.reward_mean for point in steps[-NUM_LAST_STEPS:])) is not None:
        num_last = min(NUM_LAST_STEPS, len(steps))
        shown.append(
            Tile("Reward", number(reward), "last step" if num_last == 1 else f"mean of the last {num_last} steps")
        )
    if own + foreign:
        share = foreign / (own + foreign)
        shown.append(Tile("Learned from peers", percent(share), f"{foreign:,} of {own + foreign:,} groups used"))
    shown.append(Tile("Tokens generated", large(tokens["made"]), f"{large(tokens['received'])} more came from peers"))
    shown.append(
        Tile("Groups rejected", f"{refused:,}", f"{facts.event_totals.traffic.total('received'):,} accepted from peers")
    )
    return shown


def summary(facts: RunFacts) -> list[str]:
    """Return a summary of the run in a few sentences."""
    steps = facts.history.steps
    if not steps:
        return ["The node has completed no step yet, so there are no curves.", *_why_no_step(facts)]
    says = [f"{plural(len(steps), 'step')} in {length(steps[-1].time - _began_at(facts))}."]
    for points in by_task(facts)[:2]:
        first, last = points[0], points[-1]
        if first is not last:
            went = (
                "rose" if last.pass_at_1 > first.pass_at_1 else "fell" if last.pass_at_1 < first.pass_at_1 else "stayed"
            )
            ends = "" if went == "stayed" else f" from {percent(first.pass_at_1)}"
            says.append(
                f"Accuracy on {clean(first.task, limit=40)} {went}{ends} {'at' if went == 'stayed' else 'to'}"
                f" {percent(last.pass_at_1)}."
            )
    own, foreign = groups_used(steps)
    if foreign:
        says.append(f"{percent(foreign / (own + foreign))} of the groups that it trained on came from peers.")
    elif own:
        says.append("It trained on its own groups only.")
    if idle := sum(point.problem is not None for point in steps):
        says.append(f"{plural(idle, 'step')} had no effect.")
    return says


def step_rows(steps: Sequence[StepPoint]) -> list[StepRow]:
    """Return the steps in at most `NUM_ROWS` rows of about equal length."""
    num_rows = min(NUM_ROWS, len(steps))
    edges = [round(row * len(steps) / num_rows) for row in range(num_rows + 1)] if num_rows else [0]
    return [_row(steps[begin:end]) for begin, end in zip(edges[:-1], edges[1:], strict=True)]


def by_task(facts: RunFacts) -> list[list[EvaluationPoint]]:
    """Return the evaluations of each task, by step."""
    tasks: dict[str, list[EvaluationPoint]] = {}
    for point in facts.history.evaluations:
        tasks.setdefault(point.task, []).append(point)
    return [sorted(points, key=lambda point: point.step) for points in tasks.values()]


def groups_used(steps: Iterable[StepPoint]) -> tuple[int, int]:
    """Return the number of own and of foreign groups that the steps trained on."""
    pairs = [(point.own_groups or 0, point.foreign_groups or 0) for point in steps]
    return sum(own for own, _ in pairs), sum(foreign for _, foreign in pairs)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _row(steps: Sequence[StepPoint]) -> StepRow:
    own, foreign = groups_used(steps)
    first, last = steps[0].step, steps[-1].step
    return StepRow(
        steps=f"{first:,}" if first == last else f"{first:,}–{last:,}",
        reward=mean(point.reward_mean for point in steps),
        loss=mean(point.loss for point in steps),
        kept=mean(point.kept_fraction for point in steps),
        truncated=mean(point.truncated_fraction for point in steps),
        mean_kl=mean(point.mean_kl for point in steps),
        own_groups=own,
        foreign_groups=foreign,
        num_tokens=sum(point.num_tokens or 0 for point in steps),
        duration_s=sum(point.duration_s or 0.0 for point in steps),
        without_change=sum(point.problem is not None for point in steps),
    )


def _accuracy_tile(points: Sequence[EvaluationPoint]) -> Tile:
    last = points[-1]
    best = max(points, key=lambda point: point.pass_at_1)
    of_best = (
        "its best" if best.pass_at_1 == last.pass_at_1 else f"best {percent(best.pass_at_1)} at step {best.step:,}"
    )
    return Tile(f"Accuracy, {clean(last.task, limit=24)}", percent(last.pass_at_1), f"step {last.step:,}; {of_best}")


def _time_a_step(steps: Sequence[StepPoint]) -> str:
    if len(steps) < 2:
        return ""
    return f"{number((steps[-1].time - steps[0].time) / (len(steps) - 1))} s per step"


def _began_at(facts: RunFacts) -> float:
    steps, began_at = facts.history.steps, facts.event_totals.began_at
    return steps[0].time if began_at is None else min(began_at, steps[0].time)


def _why_no_step(facts: RunFacts) -> list[str]:
    role = facts.status.node.role
    if role in {"generator", "exchange", "bootstrap"}:
        return [f"Its role is {role}: it has no learner."]
    made, received = (facts.event_totals.traffic.total(kind) for kind in ("made", "received"))
    return [f"It generated {plural(made, 'group')} and accepted {received:,} from peers. A step needs more."]
