"""The head and the lines of figures: both workers, the groups used, the swarm, buffer and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.snapshot import Phase
from ftis_node.dashboard.view.spans import (
    Line,
    Span,
    Tone,
    count,
    duration,
    faded,
    harmless,
    labelled,
    line,
    number,
    percent,
)
from ftis_node.telemetry.sizes import size

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import GpuFigures, Reading

BAR_WIDTH = 20
NUM_REASONS = 3
STATE_TONES = {
    "ready": Tone.GOOD,
    "running": Tone.GOOD,
    "connected": Tone.GOOD,
    "failed": Tone.BAD,
    "backing-off": Tone.BAD,
    "silent": Tone.BAD,
    "stopped": Tone.WARN,
}


def state_span(state: str) -> Span:
    """A state's word in its tone."""
    return Span(harmless(state), STATE_TONES.get(state, Tone.WARN))


def head_line(reading: Reading) -> Line:
    """Who it is, and in what state."""
    status = reading.status
    node, run = status.node, status.run
    state = node.state if reading.phase is Phase.RUNNING else reading.phase.value
    up = f" {duration(node.uptime_s)}" if reading.phase is Phase.RUNNING else ""
    role = "" if node.role == "full" else f"  {node.role}"
    who = (Span(harmless(node.name) or "ftis-node", Tone.STRONG), "  ", state_span(state), up, role)
    if not run.id:  # it never came so far as to tell
        return line(*who)
    return line(
        *who,
        Span("  run ", Tone.FAINT),
        f"{harmless(run.name)} ({harmless(run.id[:8])})",
        Span("  model ", Tone.FAINT),
        f"{harmless(status.model.name) or '-'} {count(status.model.parameters)}",
    )


def figure_lines(reading: Reading) -> tuple[Line, ...]:
    """Six lines of 80 columns, seven where it is known what is trained; of a node that does not run they are faded."""
    first = (_generation(reading), _learner(reading), *_training(reading))
    lines = (*first, _shares(reading), _swarm(reading), _buffer(reading))
    return (*(lines if reading.is_live else map(faded, lines)), _machine(reading))


def _generation(reading: Reading) -> Line:
    generation = reading.status.generation
    return labelled(
        "generation",
        state_span(generation.state),
        f", {generation.engine or '-'}  ",
        Span(f"{count(generation.tokens_per_s)} tokens/s", Tone.STRONG),
        f"  {count(generation.groups_made)} groups, {count(generation.tokens_made)} tokens",
        f"  version {generation.policy_version}{_restarts(generation.restarts)}",
    )


def _learner(reading: Reading) -> Line:
    learner = reading.status.learner
    kept = "-" if learner.kept_fraction is None else f"{learner.kept_fraction:.0%}"
    return labelled(
        "learner",
        state_span(learner.state),
        "  ",
        Span(f"{count(learner.tokens_per_s)} tokens/s", Tone.STRONG),
        f"  step {learner.step}, loss {number(learner.loss, digits=2)}, kept {kept}",
        f", rate {number(learner.learning_rate, digits=2)}{_restarts(learner.restarts)}",
    )


def _training(reading: Reading) -> tuple[Line, ...]:
    """What of the model is trained and why, cut at the edge."""
    training = reading.status.model.training
    return (labelled("trains", harmless(training)),) if training else ()


def _restarts(restarts: int) -> str:
    return f"  {restarts} restarts" if restarts else ""


def _shares(reading: Reading) -> Line:
    """What the learner used: a bar of own and foreign."""
    learner = reading.status.learner
    total = learner.own_groups + learner.foreign_groups
    filled = round(BAR_WIDTH * learner.own_groups / total) if total else 0
    return labelled(
        "learnt from",
        f"own {count(learner.own_groups)} ",
        Span("█" * filled, Tone.GOOD),
        Span("░" * (BAR_WIDTH - filled), Tone.FAINT),
        f" {count(learner.foreign_groups)} foreign ({percent(learner.foreign_groups, total)})",
    )


def _swarm(reading: Reading) -> Line:
    swarm = reading.status.swarm
    refused = sorted(swarm.groups_refused.items(), key=lambda item: -item[1])
    total = sum(swarm.groups_refused.values())
    reasons = ", ".join(f"{harmless(reason)} {many}" for reason, many in refused[:NUM_REASONS])  # cut at the edge
    return labelled(
        "groups",
        f"{count(swarm.groups_sent)} sent, {count(swarm.groups_confirmed)} confirmed",
        f", {count(swarm.groups_received)} received, ",
        Span(f"{count(total)} refused", Tone.WARN if total else Tone.PLAIN),
        f": {reasons}" if reasons else "",
    )


def _buffer(reading: Reading) -> Line:
    replay, swarm = reading.status.replay, reading.status.swarm
    return labelled(
        "buffer",
        f"{replay.waiting} waiting, {replay.ready} ready, {replay.taken} taken, {size(replay.disk_bytes)}",
        Span("  wire ", Tone.FAINT),
        f"{size(swarm.bytes_in)} in, {size(swarm.bytes_out)} out",
    )


def _machine(reading: Reading) -> Line:
    machine = reading.machine
    gpus = ", ".join(_gpu(gpu) for gpu in machine.gpus) or "none seen"
    return labelled(
        "memory",
        f"node {size(machine.resident_bytes)}" if machine.num_processes else "node -",
        f", machine {_part(machine.ram_used_bytes, machine.ram_total_bytes)}",
        Span("  GPU ", Tone.FAINT),
        gpus,
    )


def _gpu(gpu: GpuFigures) -> str:
    return f"{_part(gpu.used_bytes, gpu.total_bytes)}, {gpu.busy:.0%} busy"


def _part(used_bytes: int, total_bytes: int) -> str:
    return f"{used_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB"
