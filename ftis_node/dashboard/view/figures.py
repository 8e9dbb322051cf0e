"""Head line and metric lines: both workers, the groups used, the swarm, the buffer and the memory. Curves with axes.

plotext draws a curve in a few rows of braille.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftis_node.dashboard.view.spans import (
    Line,
    Span,
    Tone,
    count,
    faded,
    labeled,
    line,
    number,
    percent,
)
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.history import thinned
from ftis_node.telemetry.terminal_text import printable, size

if TYPE_CHECKING:
    from ftis_node.dashboard.watcher import NodeSnapshot

BAR_WIDTH = 20
NUM_REASONS = 3
STATE_TONES = {
    "ready": Tone.GOOD,
    "running": Tone.GOOD,
    "connected": Tone.GOOD,
    "failed": Tone.BAD,
    "backing-off": Tone.BAD,
    "silent": Tone.BAD,
    "stopped": Tone.FAINT,  # a user stopped it; after a fault the answer `healthy` is in red
}
Points = Sequence[tuple[float, float]]  # (step, value), steps ascending
DOTS_A_CELL = 2  # a braille cell is two dots wide
LEAST_WIDTH, LEAST_HEIGHT = 12, 3
LEAST_SPAN = 0.02  # keeps noise on a flat curve small


def state_span(state: str) -> Span:
    return Span(printable(state), STATE_TONES.get(state, Tone.WARN))


def head_line(snapshot: NodeSnapshot) -> Line:
    status = snapshot.status
    node, run = status.node, status.run
    up = f" {duration(node.uptime_s)}" if snapshot.is_live else ""
    role = "" if node.role == "full" else f"  {node.role}"
    who = (Span(printable(node.name) or "ftis-node", Tone.STRONG), "  ", state_span(snapshot.state), up, role)
    if not run.id:  # the node ended before its first status
        return line(*who)
    return line(
        *who,
        Span("  run ", Tone.FAINT),
        f"{printable(run.name)} ({printable(run.id[:8])})",
        Span("  model ", Tone.FAINT),
        f"{printable(status.model.name) or '-'} {count(status.model.parameters)}",
    )


def metric_lines(snapshot: NodeSnapshot) -> tuple[Line, ...]:
    """Return six lines of 80 columns, seven if the trained part is known; faded for a node that is not running."""
    training = snapshot.status.model.training
    lines = (
        _generation(snapshot),
        _learner(snapshot),
        *([labeled("trains", printable(training))] if training else []),
        _shares(snapshot),
        _swarm(snapshot),
        _buffer(snapshot),
    )
    return (*(lines if snapshot.is_live else map(faded, lines)), _machine(snapshot))


def _generation(snapshot: NodeSnapshot) -> Line:
    generation = snapshot.status.generation
    return labeled(
        "generation",
        state_span(generation.state),
        f", {generation.engine or '-'}  ",
        Span(f"{count(generation.tokens_per_s)} tokens/s", Tone.STRONG),
        f"  {count(generation.groups_made)} groups, {count(generation.tokens_made)} tokens",
        f"  version {generation.policy_version}{_restarts(generation.restarts)}",
    )


def _learner(snapshot: NodeSnapshot) -> Line:
    learner = snapshot.status.learner
    kept = "-" if learner.kept_fraction is None else f"{learner.kept_fraction:.0%}"
    return labeled(
        "learner",
        state_span(learner.state),
        "  ",
        Span(f"{count(learner.tokens_per_s)} tokens/s", Tone.STRONG),
        f"  step {learner.step}, loss {number(learner.loss, digits=2)}, kept {kept}",
        f", rate {number(learner.learning_rate, digits=2)}{_restarts(learner.restarts)}",
    )


def _restarts(restarts: int) -> str:
    return f"  {restarts} restarts" if restarts else ""


def _shares(snapshot: NodeSnapshot) -> Line:
    learner = snapshot.status.learner
    total = learner.own_groups + learner.foreign_groups
    filled = round(BAR_WIDTH * learner.own_groups / total) if total else 0
    return labeled(
        "trained on",
        f"own {count(learner.own_groups)} ",
        Span("█" * filled, Tone.GOOD),
        Span("░" * (BAR_WIDTH - filled), Tone.FAINT),
        f" {count(learner.foreign_groups)} foreign ({percent(learner.foreign_groups, total)})",
    )


def _swarm(snapshot: NodeSnapshot) -> Line:
    swarm = snapshot.status.swarm
    refused = sorted(swarm.groups_refused.items(), key=lambda item: -item[1])
    total = sum(swarm.groups_refused.values())
    # The screen clips the reasons at its edge.
    reasons = ", ".join(f"{printable(reason)} {many}" for reason, many in refused[:NUM_REASONS])
    return labeled(
        "groups",
        f"{count(swarm.groups_sent)} sent, {count(swarm.groups_confirmed)} confirmed",
        f", {count(swarm.groups_received)} received, ",
        Span(f"{count(total)} rejected", Tone.WARN if total else Tone.PLAIN),
        f": {reasons}" if reasons else "",
    )


def _buffer(snapshot: NodeSnapshot) -> Line:
    replay, swarm = snapshot.status.replay, snapshot.status.swarm
    return labeled(
        "buffer",
        f"{replay.waiting} waiting, {replay.ready} ready, {replay.taken} taken, {size(replay.disk_bytes)}",
        Span("  wire ", Tone.FAINT),
        f"{size(swarm.bytes_in)} in, {size(swarm.bytes_out)} out",
    )


def _machine(snapshot: NodeSnapshot) -> Line:
    machine = snapshot.machine
    gpus = [f"{_part(gpu.used_bytes, gpu.total_bytes)}, {gpu.busy:.0%} busy" for gpu in machine.gpus]
    return labeled(
        "memory",
        f"node {size(machine.resident_bytes)}" if machine.num_processes else "node -",
        f", machine {_part(machine.ram_used_bytes, machine.ram_total_bytes)}",
        Span("  GPU ", Tone.FAINT),
        ", ".join(gpus) or "none seen",
    )


def _part(used_bytes: int, total_bytes: int) -> str:
    return f"{used_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB"


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
