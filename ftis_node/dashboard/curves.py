"""Curves of the main screen with their titles and axes. plotext draws a curve in a few rows of braille."""

from __future__ import annotations

from collections.abc import Sequence

from ftis_node.telemetry.history import thinned
from ftis_node.telemetry.terminal_text import printable
from ftis_node.view.snapshot import NodeSnapshot

Points = Sequence[tuple[float, float]]  # (step, value), steps ascending
DOTS_A_CELL = 2  # a braille cell is two dots wide
LEAST_WIDTH, LEAST_HEIGHT = 12, 3
LEAST_SPAN = 0.02  # keeps noise on a flat curve small


def reward_curve(snapshot: NodeSnapshot) -> tuple[str, Points]:
    """Return a title and the mean reward of each step."""
    steps = snapshot.history.steps
    points = tuple((point.step, point.reward_mean) for point in steps if point.reward_mean is not None)
    return f"reward of a step {points[-1][1]:.3f}" if points else "reward of a step", points


def pass_curve(snapshot: NodeSnapshot) -> tuple[str, Points]:
    """Return a title and pass@1 of the task with the newest evaluation."""
    evaluations = snapshot.history.evaluations
    if not evaluations:
        return "pass@1", ()
    last = evaluations[-1]
    title = f"pass@1 {last.pass_at_1:.3f} of {last.n} {printable(last.task)}"
    return title, tuple((point.step, point.pass_at_1) for point in evaluations if point.task == last.task)


def plot_rows(points: Points, *, width: int, height: int) -> list[str]:
    """Return `height` rows of `width` characters. Call it in one thread: plotext keeps one global figure."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return []
    if not points:
        return ["no data yet"]
    import plotext

    steps, values = zip(*thinned(points, width * DOTS_A_CELL), strict=True)
    low, high = min(values), max(values)
    slack = max(0.0, LEAST_SPAN - (high - low)) / 2
    low, high = low - slack, high + slack
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.frame(False)
    # By default plotext uses the size of this process's terminal, but a browser page has none.
    plotext.limit_size(False, False)
    plotext.plotsize(width, height)
    plotext.ylim(low, high)
    plotext.yticks([low, high], [f"{low:.2f} ", f"{high:.2f} "])
    ends = sorted({steps[0], steps[-1]})
    plotext.xticks(ends, [f"{step:.0f}" for step in ends])
    draw = plotext.plot if len(steps) > 1 else plotext.scatter
    draw(steps, values, marker="braille")
    return [row.rstrip() for row in plotext.uncolorize(plotext.build()).split("\n")[:height]]
