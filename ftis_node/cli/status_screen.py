"""The status of a node as one screen of 80 x 24, and as one line for a log. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.spans import number
from ftis_node.telemetry.health_summary import BUDGET_UNITS, OFF, AnswerWord, duration, refusal_facts, summarize_health
from ftis_node.telemetry.terminal_text import labeled, printable, size, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.telemetry.health_summary import HealthSummary
    from ftis_node.telemetry.status import (
        BudgetStatus,
        EvalStatus,
        GenerationStatus,
        LearnerStatus,
        LimitsStatus,
        ModelStatus,
        Status,
        SwarmStatus,
    )

WIDTH, WIDEST = 80, 99
HEIGHT = 23  # one of the 24 lines is for the prompt
ID_TAIL = 8
MIN_SHOWN_SKEW_S = 1.0
MAX_EVALUATIONS = 3
MAX_REFUSALS = 2  # of each direction
ENDED_WELL = (AnswerWord.FINISHED, AnswerWord.STOPPED)
STEP_FIGURES = {
    "loss": "loss",
    "reward_mean": "reward",
    "kept_fraction": "kept",
    "truncated_fraction": "truncated",
    "mean_kl": "KL",
    "kl_to_start": "KL to the start",
    "grad_norm": "gradient",
    "learning_rate": "rate",
}


def screen(status: Status, *, now: float, width: int = WIDTH) -> list[str]:
    """Return the lines, each at most `width` cells wide. `now` is Unix time in seconds."""
    health = summarize_health(status, now=now)
    if health.healthy.word in ENDED_WELL:
        lines = wrapped(f"{health.healthy.word}: {health.healthy.why}", width, indent=2)
        lines += wrapped(f"- {health.healthy.advice}", width, indent=2)
    else:
        lines = ["   ".join(f"{question}: {answer.word}" for question, answer in health.items())]
    for explanation in (*_explanations(health), *_refusals(status.swarm, now)):
        lines += wrapped(explanation, width, indent=2)
    return [*lines, *labeled(_facts(status, now), width)][:HEIGHT]


def log_line(status: Status, *, now: float) -> str:
    """Return one line for a log: the answers, the reasons of those that are not yes, and the values that change."""
    health = summarize_health(status, now=now)
    answers = [
        f"{question} {answer.word}" + ("" if answer.word is AnswerWord.YES else f" ({answer.why})")
        for question, answer in health.items()
    ]
    if health.healthy.word in ENDED_WELL:
        answers = [f"{health.healthy.word} ({health.healthy.why})"]
    learner, swarm = status.learner, status.swarm
    figures = [
        f"step {learner.step}",
        f"reward {number(learner.reward_mean, digits=3)}",
        f"{status.generation.tokens_per_s:.0f} tokens/s",
        f"{swarm.peers_connected} peers",
        f"{swarm.groups_sent} sent",
        f"{swarm.groups_confirmed} confirmed",
        f"{swarm.groups_received} received",
    ]
    return printable(f"{', '.join(answers)}; {', '.join(figures)}")


def _explanations(health: HealthSummary) -> Iterator[str]:
    """Yield the reason of each answer that is not yes, and the remedy. A reason of two answers appears once."""
    shown_reasons: set[str] = set()
    for question, answer in health.items():
        text = answer.why + (f": {answer.advice}" if answer.advice else "")
        if answer.word not in (AnswerWord.YES, *ENDED_WELL) and answer.why not in shown_reasons:
            yield f"{'!' if answer.word is AnswerWord.NO else '-'} {question}: {text}"
            shown_reasons.add(answer.why)


def _refusals(swarm: SwarmStatus, now: float) -> Iterator[str]:
    """Yield who refuses this node's groups, and whose groups it refuses, with what to do."""
    for mark, what, refusals in (
        ("!", "its groups are refused by", swarm.refused_by),
        ("-", "it refuses the groups of", swarm.refused_peers),
    ):
        for refusal in refusals[:MAX_REFUSALS]:
            yield printable(f"{mark} {what} {refusal_facts(refusal, now=now)}: {refusal.advice}")
        if num_more := len(refusals[MAX_REFUSALS:]):
            yield f"{mark} {what} {num_more} more peers: see status --json"


def _facts(status: Status, now: float) -> Iterator[tuple[str, str]]:
    node, run, model = status.node, status.run, status.model
    if not node.peer_id:  # the node has never started before
        return
    generation, swarm, replay = status.generation, status.swarm, status.replay
    yield "node", f"{node.name} (..{node.peer_id[-ID_TAIL:]}), {node.role}, {_state(status, now)}"
    yield "run", f"{run.name} ({run.id[:12]}), {run.method} on {run.task}"
    if node.domain:
        yield "domain", node.domain
    if budget := _budget(status.budget):
        yield "budget", budget
    yield "model", f"{model.name}, {model.parameters:,} parameters, {_trained(model)}"
    if model.training:
        yield "trains", model.training
    if node.role == "exchange":
        yield "trainer", _trainer(generation, status.learner)
    else:
        yield "generation", _generation(generation)
        yield from _learner(status.learner, now)
    reach = "" if swarm.reachability in ("unknown", "") else f"; reachable: {swarm.reachability}"
    yield "swarm", f"{swarm.state}: {swarm.reason}{reach}{_skew(swarm)}"
    yield (
        "",
        f"{swarm.peers_connected} of {swarm.peers_known} known peers connected, groups since the start: "
        f"{swarm.groups_sent} sent, {swarm.groups_confirmed} confirmed, {swarm.groups_received} received",
    )
    if swarm.groups_refused:
        yield "refused", _counts(swarm.groups_refused)
    yield (
        "replay",
        f"{replay.waiting} waiting, {replay.ready} ready, {replay.taken} taken, {size(replay.disk_bytes)} on disk",
    )
    yield from _disk(status.limits)
    if swarm.weights_bytes_in or swarm.weights_bytes_out:
        yield "weights", _weights(swarm)
    yield from _evaluations(status.eval)


def _budget(budget: BudgetStatus) -> str:
    amounts = [(getattr(budget, name), unit) for name, unit in BUDGET_UNITS.items()]
    return ", ".join(f"{one.used:,} of {one.limit:,} {unit}" for one, unit in amounts if one.limit is not None)


def _generation(generation: GenerationStatus) -> str:
    if generation.state == OFF:
        return "off: this role learns from what others generate"
    way = generation.hand_over
    return (
        f"{generation.state} ({generation.engine}), {generation.tokens_per_s:.0f} tokens/s, "
        f"{generation.groups_made} groups in all, version {generation.policy_version}{_restarts(generation)}"
        + (f", new weights by {way}" if way else "")
    )


def _trainer(generation: GenerationStatus, learner: LearnerStatus) -> str:
    return (
        f"step {generation.policy_version}, groups in all: {generation.groups_made} shared, "
        f"{learner.foreign_groups} foreign given to it"
    )


def _learner(learner: LearnerStatus, now: float) -> Iterator[tuple[str, str]]:
    if learner.state == OFF:
        yield "learner", "off: this role generates for a learner elsewhere"
        return
    last = learner.last_step_at
    ago = "" if last is None else f" ({duration(now - last)} ago)"
    layout = f", {learner.layout}" if learner.layout else ""
    kernels = f", kernels: {learner.kernels}" if learner.kernels else ""
    yield (
        "learner",
        f"{learner.state}, step {learner.step}{ago}, {learner.tokens_per_s or 0:.0f} tokens/s, groups used: "
        f"{learner.own_groups} own, {learner.foreign_groups} foreign{_restarts(learner)}{layout}{kernels}",
    )
    known = [
        f"{name} {number(value, digits=3)}"
        for key, name in STEP_FIGURES.items()
        if (value := getattr(learner, key)) is not None
    ]
    if known:
        yield "last step", ", ".join(known)
    if learner.mismatch_kl is not None:
        yield (
            "mismatch",
            f"engine to learner KL {learner.mismatch_kl:.2g}, {learner.mismatch_share:.1%} of ratios off by "
            f"more than 1 % (version {learner.mismatch_version})",
        )


def _state(status: Status, now: float) -> str:
    node, taken_at = status.node, status.health.taken_at
    if node.state == "running":
        return f"running for {duration(node.uptime_s)}, version {node.version}"
    if node.state == "stopping":
        waits_for = f": it waits for {node.waits_for}" if node.waits_for else ""
        return f"version {node.version}, stopping{waits_for}"
    seen = f", last seen {duration(now - taken_at)} ago" if taken_at else ""
    return f"{node.state}{seen}, version {node.version}"


def _disk(limits: LimitsStatus) -> Iterator[tuple[str, str]]:
    if limits.home_bytes is not None:
        used = {part: size(getattr(limits, f"{part}_bytes")) for part in ("home", "buffer", "disk_free")}
        most = {part: size(getattr(limits, f"{part}_limit_bytes")) for part in ("home", "buffer")}
        yield (
            "disk",
            f"home {used['home']} of {most['home']}, groups {used['buffer']} of {most['buffer']}, "
            f"{used['disk_free']} free",
        )


def _trained(model: ModelStatus) -> str:
    trained, total = model.trainable_parameters, model.parameters
    return "all trained" if trained == total else f"{trained:,} trained"


def _restarts(worker: GenerationStatus | LearnerStatus) -> str:
    return f", {worker.restarts} restarts" if worker.restarts else ""


def _skew(swarm: SwarmStatus) -> str:
    skew_s = swarm.clock_skew_s
    if skew_s is None or abs(skew_s) < MIN_SHOWN_SKEW_S:
        return ""
    return f"; the peers' clocks are {skew_s:+.1f} s off ours: switch on time synchronization"


def _weights(swarm: SwarmStatus) -> str:
    age_s, refused = swarm.weights_age_s, sum(swarm.weights_refused.values())
    age = "" if age_s is None else f", those served are {duration(age_s)} old"
    megabytes = f"{swarm.weights_bytes_in / 1e6:.1f} MB in, {swarm.weights_bytes_out / 1e6:.1f} MB out"
    return f"{megabytes}, {refused} rejected{age}"


def _evaluations(evaluations: list[EvalStatus]) -> Iterator[tuple[str, str]]:
    """Yield the newest evaluation of each task beside the first one."""
    first: dict[str, EvalStatus] = {}
    newest: dict[str, EvalStatus] = {}
    for evaluation in evaluations:
        first.setdefault(evaluation.task, evaluation)
        newest[evaluation.task] = evaluation
    for task, last in list(newest.items())[:MAX_EVALUATIONS]:
        before = first[task]
        at_first = "" if before is last else f", {before.pass_at_1:.3f} at step {before.step}"
        yield "pass@1", f"{last.pass_at_1:.3f} at step {last.step}{at_first} ({last.n} problems of {task})"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
