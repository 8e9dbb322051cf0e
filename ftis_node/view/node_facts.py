"""Facts about a node: each a label and one line. A renderer shows all, or selects labels."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ftis_node.telemetry.clock import NOTABLE_SKEW_S
from ftis_node.telemetry.health_summary import (
    BUDGET_UNITS,
    CUT_SHARE,
    FROM_START_KL,
    ID_TAIL,
    NO_SIGNAL_SHARE,
    OFF,
    START_KL,
    duration,
    pause_words,
    plural,
    used_by_peers,
)
from ftis_node.telemetry.status import EvalStatus, GenerationStatus, LearnerStatus, Status, SwarmStatus
from ftis_node.telemetry.terminal_text import size
from ftis_node.view.formats import count, number, percent
from ftis_node.view.snapshot import MachineUsage, NodeSnapshot
from ftis_node.view.spans import Line, Span, Tone, line

BAR_WIDTH = 20
MAX_EVALUATIONS = 3
STATE_TONES = {
    **dict.fromkeys(("ready", "running", "connected"), Tone.GOOD),
    **dict.fromkeys(("failed", "backing-off", "silent"), Tone.BAD),
    "stopped": Tone.FAINT,  # a user stopped it; after a fault the answer `healthy` is in red
}
STEP_FIGURES = {
    "loss": "loss",
    "kept_fraction": "kept",
    "learning_rate": "rate",
    "reward_mean": "reward",
    "truncated_fraction": "truncated",
    "mean_kl": "KL",
    "grad_norm": "gradient",
}
ANSWER_FIGURES = {  # with their factor, and the value above which they are a warning
    "completion_tokens": ("{:.0f} tokens", 1, inf),
    "cut_fraction": ("{:.0f} % cut", 100, CUT_SHARE),
    "no_signal_fraction": ("{:.0f} % no signal", 100, NO_SIGNAL_SHARE),
    "entropy": ("entropy {:.2g}", 1, inf),
    "kl_to_start": ("KL to start {:.2g}", 1, START_KL),
    "kl_from_start": ("KL from start {:.2g}", 1, FROM_START_KL),
}
Fact = tuple[str, Line]


def node_facts(snapshot: NodeSnapshot) -> Iterator[Fact]:
    """Yield each label with its line, in display order. Unknown facts are left out."""
    status = snapshot.status
    node, run, model, swarm, replay = status.node, status.run, status.model, status.swarm, status.replay
    yield "node", line(f"{node.name} (..{node.peer_id[-ID_TAIL:]}), {node.role}, {_state(status, snapshot.taken_at)}")
    yield "run", line(f"{run.name} ({run.id[:12]}), {run.method} on {run.task}")
    if node.domain:
        yield "domain", line(node.domain)
    budget = [(getattr(status.budget, name), unit) for name, unit in BUDGET_UNITS.items()]
    if limits := [f"{one.used:,} of {one.limit:,} {unit}" for one, unit in budget if one.limit is not None]:
        yield "budget", line(", ".join(limits))
    trained = f"{model.trainable_parameters:,}" if model.trainable_parameters != model.parameters else "all"
    yield "model", line(f"{model.name}, {model.parameters:,} parameters, {trained} trained")
    if node.role == "exchange":
        shared, given = status.generation.groups_made, status.learner.foreign_groups
        step = status.generation.policy_version
        yield "trainer", line(f"step {step}, groups in all: {shared} shared, {given} foreign given to it")
    else:
        yield "generation", _generation(status.generation)
        if status.generation.turns_made:
            made = status.generation
            turns, observed = plural(made.turns_made, "turn"), plural(made.observations_made, "observation")
            yield "episodes", line(f"{turns} and {observed} since the start")
        yield "learner", _learner(status.learner, snapshot.taken_at)
        if answers := _answers(status.learner):
            yield "answers", answers
        if model.training:
            yield "trains", line(model.training)
        if status.learner.state != OFF:
            yield "trained on", _groups_used(status.learner)
    yield from _evaluations(status.eval)
    if (learner := status.learner).mismatch_kl is not None:
        off = f"{percent(learner.mismatch_share)} of ratios off by more than 1 % (version {learner.mismatch_version})"
        yield "mismatch", line(f"engine to learner KL {number(learner.mismatch_kl)}, {off}")
    yield "swarm", _swarm(swarm)
    yield "groups", _groups(swarm)
    if swarm.used_by_peers.peers:
        yield "used", line(used_by_peers(swarm.used_by_peers))
    if swarm.newer_release:
        yield "release", line(Span(swarm.newer_release, Tone.WARN))
    states = f"{replay.waiting} waiting, {replay.ready} ready, {replay.taken} taken, {size(replay.disk_bytes)}"
    wire = f"{size(swarm.bytes_in)} in, {size(swarm.bytes_out)} out"
    yield "buffer", line(states, Span("  wire ", Tone.FAINT), wire)
    if status.limits.home_bytes is not None:
        yield "disk", _disk(status)
    if swarm.weights_bytes_in or swarm.weights_bytes_out:
        yield "weights", _weights(swarm)
    if snapshot.machine.ram_total_bytes:
        yield "memory", _memory(snapshot.machine)


def head_line(snapshot: NodeSnapshot) -> Line:
    node, run, model = snapshot.status.node, snapshot.status.run, snapshot.status.model
    up = f" {duration(node.uptime_s)}" if snapshot.is_live else ""
    role = "" if node.role == "full" else f"  {node.role}"
    who = (Span(node.name or "ftis-node", Tone.STRONG), "  ", _state_span(snapshot.state), up, role)
    if not run.id:  # the node ended before its first status
        return line(*who)
    of_run = (Span("  run ", Tone.FAINT), f"{run.name} ({run.id[:8]})")
    return line(*who, *of_run, Span("  model ", Tone.FAINT), f"{model.name or '-'} {count(model.parameters)}")


def _state(status: Status, now: float) -> str:
    node, taken_at = status.node, status.health.taken_at
    if node.state == "running" and (pause := status.pause).reason:
        return f"{pause_words(pause.reason, pause.until, now=now)}, version {node.version}"
    if node.state == "running":
        return f"running for {duration(node.uptime_s)}, version {node.version}"
    if node.state == "stopping":
        waits_for = f": it waits for {node.waits_for}" if node.waits_for else ""
        return f"version {node.version}, stopping{waits_for}"
    seen = f", last seen {duration(now - taken_at)} ago" if taken_at else ""
    return f"{node.state}{seen}, version {node.version}"


def _state_span(state: str) -> Span:
    return Span(state, STATE_TONES.get(state, Tone.WARN))


def _generation(generation: GenerationStatus) -> Line:
    if generation.state == OFF:
        return line("off: this role learns from what others generate")
    transfer = generation.weight_transfer
    return line(
        *(_state_span(generation.state), f", {generation.engine or '-'}, "),
        Span(f"{count(generation.tokens_per_s)} tokens/s", Tone.STRONG),
        f", {count(generation.groups_made)} groups, {count(generation.tokens_made)} tokens"
        f", version {generation.policy_version}{_restarts(generation)}",
        f", new weights by {transfer}" if transfer else "",
    )


def _learner(learner: LearnerStatus, now: float) -> Line:
    """Return the state with the values of the last step, the most important first: a small screen clips the line."""
    if learner.state == OFF:
        return line("off: this role generates for a learner elsewhere")
    values = ((name, getattr(learner, key)) for key, name in STEP_FIGURES.items())
    rest = [f"{name} {number(value)}" for name, value in values if value is not None]
    if learner.last_step_at is not None:
        rest.append(f"last step {duration(now - learner.last_step_at)} ago")
    rest += [learner.layout] if learner.layout else []
    rest += [f"kernels: {learner.kernels}"] if learner.kernels else []
    return line(
        *(_state_span(learner.state), ", ", Span(f"{count(learner.tokens_per_s)} tokens/s", Tone.STRONG)),
        ", ".join([f", step {learner.step}{_restarts(learner)}", *rest]),
    )


def _answers(learner: LearnerStatus) -> Line:
    """Return what training does to the node's own completions, from the last step; empty without figures."""
    parts: list[Span] = []
    for key, (text, factor, limit) in ANSWER_FIGURES.items():
        if (value := getattr(learner, key)) is not None:
            tone = Tone.WARN if value > limit else Tone.PLAIN
            parts.append(Span((", " if parts else "") + text.format(factor * value), tone))
    return line(*parts)


def _restarts(worker: GenerationStatus | LearnerStatus) -> str:
    return f", {worker.restarts} restarts" if worker.restarts else ""


def _groups_used(learner: LearnerStatus) -> Line:
    own, foreign = learner.own_groups, learner.foreign_groups
    total = own + foreign
    filled = round(BAR_WIDTH * own / total) if total else 0
    bar = (Span("█" * filled, Tone.GOOD), Span("░" * (BAR_WIDTH - filled), Tone.FAINT))
    share = percent(foreign / total if total else None)
    return line(f"own {count(own)} ", *bar, f" {count(foreign)} foreign ({share})")


def _swarm(swarm: SwarmStatus) -> Line:
    reach = "" if swarm.reachability in ("unknown", "") else f"; reachable: {swarm.reachability}"
    skew_s = swarm.clock_skew_s or 0.0
    skew = f"; the peers' clocks are {skew_s:+.1f} s off ours: switch on time synchronization"
    return line(
        f"{swarm.state}: {swarm.reason}; {swarm.peers_connected} of {swarm.peers_known} known peers connected"
        f"{reach}{skew if abs(skew_s) >= NOTABLE_SKEW_S else ''}"
    )


def _groups(swarm: SwarmStatus) -> Line:
    refused = sorted(swarm.groups_refused.items(), key=lambda item: -item[1])
    total = sum(swarm.groups_refused.values())
    reasons = ", ".join(f"{reason} {many}" for reason, many in refused)
    return line(
        f"{count(swarm.groups_sent)} sent, {count(swarm.groups_confirmed)} confirmed"
        f", {count(swarm.groups_received)} received, ",
        Span(f"{count(total)} refused", Tone.WARN if total else Tone.PLAIN),
        f": {reasons}" if reasons else "",
    )


def _disk(status: Status) -> Line:
    limits = status.limits
    home, buffer, free = (size(getattr(limits, f"{name}_bytes")) for name in ("home", "buffer", "disk_free"))
    most_home, most_buffer = size(limits.home_limit_bytes or 0), size(limits.buffer_limit_bytes)
    return line(f"home {home} of {most_home}, groups {buffer} of {most_buffer}, {free} free")


def _weights(swarm: SwarmStatus) -> Line:
    age = "" if swarm.weights_age_s is None else f", those served are {duration(swarm.weights_age_s)} old"
    refused = sum(swarm.weights_refused.values())
    return line(f"{size(swarm.weights_bytes_in)} in, {size(swarm.weights_bytes_out)} out, {refused} refused{age}")


def _evaluations(evaluations: list[EvalStatus]) -> Iterator[Fact]:
    first = {one.task: one for one in reversed(evaluations)}
    newest = {one.task: one for one in evaluations}
    for task, last in list(newest.items())[:MAX_EVALUATIONS]:
        before = first[task]
        at_first = "" if before is last else f", {before.pass_at_1:.3f} at step {before.step}"
        cut = f", {last.cut_fraction:.0%} cut" if last.cut_fraction else ""
        problems = f"{last.n} problems of {task}{cut}"
        yield "pass@1", line(f"{last.pass_at_1:.3f} at step {last.step}{at_first} ({problems})")


def _memory(machine: MachineUsage) -> Line:
    def part(used_bytes: int, total_bytes: int) -> str:
        return f"{used_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB"

    gpus = [
        part(gpu.used_bytes, gpu.total_bytes)
        + ("" if gpu.busy is None else f", {gpu.busy:.0%} busy")
        + (f", {gpu.watts:.0f} W" if gpu.watts else "")
        for gpu in machine.gpus
    ]
    node = size(machine.resident_bytes) if machine.num_processes else "-"
    ram = part(machine.ram_used_bytes, machine.ram_total_bytes)
    return line(f"node {node}, machine {ram}", Span("  GPU ", Tone.FAINT), ", ".join(gpus) or "none seen")
