"""A curve with axes, drawn by plotext in a few rows of braille."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from ftis_node.dashboard.view.spans import sanitized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.dashboard.snapshot import NodeSnapshot

Points = tuple[tuple[float, float], ...]  # (step, value), steps ascending
DOTS_A_CELL = 2  # a braille cell is two dots wide
LEAST_WIDTH, LEAST_HEIGHT = 12, 3
LEAST_SPAN = 0.02  # keeps noise on a flat curve small


def reward_points(snapshot: NodeSnapshot) -> Points:
    """Return the mean reward of each step."""
    return tuple((point.step, point.reward_mean) for point in snapshot.history.steps if point.reward_mean is not None)


def pass_points(snapshot: NodeSnapshot) -> Points:
    """Return pass@1 of the task with the newest evaluation."""
    evaluations = snapshot.history.evaluations
    task = evaluations[-1].task if evaluations else ""
    return tuple((point.step, point.pass_at_1) for point in evaluations if point.task == task)


def reward_title(snapshot: NodeSnapshot) -> str:
    points = reward_points(snapshot)
    return f"reward of a step {points[-1][1]:.3f}" if points else "reward of a step"


def pass_title(snapshot: NodeSnapshot) -> str:
    points = pass_points(snapshot)
    if not points:
        return "pass@1"
    last = snapshot.history.evaluations[-1]
    return f"pass@1 {last.pass_at_1:.3f} of {last.n} {sanitized(last.task)}"


def thinned(points: Points, num: int) -> Points:
    """Return at most `num` points, each the mean of neighbors."""
    if len(points) <= num:
        return points
    edges = [round(index * len(points) / num) for index in range(num + 1)]
    parts = [points[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]
    return tuple((statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part)) for part in parts)


def plot_rows(points: Sequence[tuple[float, float]], *, width: int, height: int) -> list[str]:
    """Return `height` rows of `width` characters. Call it in one thread: plotext keeps one global figure."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return []
    if not points:
        return ["no data yet"]
    import plotext

    steps, values = zip(*thinned(tuple(points), width * DOTS_A_CELL), strict=True)
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
