"""Training curves of a node, read from its event log, and their plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.telemetry.events import read_events

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class LearningCurves:
    """One node's run: (step, value) pairs, and the groups that its learner used."""

    pass_at_1: list[tuple[int, float]]
    reward: list[tuple[int, float]]
    own_groups: int
    foreign_groups: int

    @property
    def step(self) -> int:
        """Return the last completed step."""
        return self.reward[-1][0] if self.reward else 0

    @property
    def foreign_fraction(self) -> float:
        """Return the fraction of remote groups among those that the learner used."""
        return self.foreign_groups / max(1, self.own_groups + self.foreign_groups)


def read_curves(events: Path) -> LearningCurves:
    """Return the curves in an event log so far."""
    steps = read_events(events, name="step")
    return LearningCurves(
        pass_at_1=[(event["step"], event["pass_at_1"]) for event in read_events(events, name="eval")],
        reward=[(event["step"], event["reward_mean"]) for event in steps if event["reward_mean"] is not None],
        own_groups=sum(event["own_groups"] for event in steps),
        foreign_groups=sum(event["foreign_groups"] for event in steps),
    )


def plot_curves(curves: Mapping[str, LearningCurves], path: Path, *, title: str) -> None:
    """Plot two panels: greedy pass@1 on held-out problems, and the mean reward of each step's groups."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, curve in curves.items():
        left.plot(*zip(*curve.pass_at_1, strict=True), marker="o", label=name)
        right.plot(*zip(*curve.reward, strict=True), label=name, linewidth=1)
    left.set(xlabel="step", ylabel="greedy pass@1, held-out problems", ylim=(0, 1.02))
    right.set(xlabel="step", ylabel="mean reward of the step's groups", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
