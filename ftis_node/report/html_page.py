"""HTML page: a template renders the facts. The template engine escapes all values; this file bounds them."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from ftis_node.plugins import installed_release
from ftis_node.report.facts import MAX_PROBLEMS, RunFacts
from ftis_node.report.run_charts import run_charts
from ftis_node.report.templates import clean, render
from ftis_node.report.timeline import sentence
from ftis_node.swarm.reasons import full_sentence
from ftis_node.telemetry.health_summary import duration, plural
from ftis_node.telemetry.history import EvaluationPoint, StepPoint, groups_used, slices
from ftis_node.view.formats import count, number, percent
from ftis_node.view.node_facts import node_facts
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import text_of

TEMPLATE = "page.html.j2"
MAX_PEERS = 60
MAX_EVALUATIONS = 24
PACKAGES = ("torch", "transformers", "vllm", "hivemind")
NODE_SETTINGS = ("engine", "device", "dtype", "lora", "seed")
MEANS = ("reward_mean", "loss", "kept_fraction", "truncated_fraction", "mean_kl")
ABOUT = {"node", "run", "domain", "budget", "model", "trains"}  # facts without addresses
NUM_LAST_STEPS = 10
NUM_ROWS = 10
NUM_TASKS = 2


def tiles(facts: RunFacts) -> list[tuple[str, str, str]]:
    steps = facts.history.steps
    own, foreign = groups_used(steps)
    refused = sum(facts.event_totals.refused.values())
    tokens = facts.event_totals.tokens
    shown = [_steps_tile(facts), *map(_accuracy_tile, islice(facts.history.by_task().values(), NUM_TASKS))]
    if (reward := mean(point.reward_mean for point in steps[-NUM_LAST_STEPS:])) is not None:
        num_last = min(NUM_LAST_STEPS, len(steps))
        shown.append(("Reward", number(reward), "last step" if num_last == 1 else f"mean of the last {num_last} steps"))
    if own + foreign:
        share = foreign / (own + foreign)
        shown.append(("Learned from peers", percent(share), f"{foreign:,} of {own + foreign:,} groups used"))
    if (used := facts.status.swarm.used_by_peers).peers:
        by_receipts = f"groups of this node that {plural(used.peers, 'peer')} trained on, by receipts"
        shown.append(("Used by peers", f"{used.groups:,}", by_receipts))
    shown.append(("Tokens generated", count(tokens["made"]), f"{count(tokens['received'])} more came from peers"))
    if turns := facts.event_totals.turns:
        shown.append(("Turns", count(turns), f"{plural(facts.event_totals.observations, 'observation')} between them"))
    accepted = facts.event_totals.traffic.total("received")
    return [*shown, ("Groups refused", f"{refused:,}", f"{accepted:,} accepted from peers")]


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _row(steps: Sequence[StepPoint]) -> dict[str, Any]:
    """Return consecutive steps as one row: their means, and the sums of groups, tokens and time."""
    own, foreign = groups_used(steps)
    first, last = steps[0].step, steps[-1].step
    return {name: mean(getattr(point, name) for point in steps) for name in MEANS} | {
        "steps": f"{first:,}" if first == last else f"{first:,}–{last:,}",
        "own_groups": own,
        "foreign_groups": foreign,
        "num_tokens": sum(point.num_tokens or 0 for point in steps),
        "duration_s": sum(point.duration_s or 0.0 for point in steps),
        "without_change": sum(point.problem is not None for point in steps),
    }


def _accuracy_tile(points: Sequence[EvaluationPoint]) -> tuple[str, str, str]:
    first, last = points[0], points[-1]
    best = max(points, key=lambda point: point.pass_at_1)
    of_best = "its best" if best.pass_at_1 == last.pass_at_1 else f"best {percent(best.pass_at_1)} at {best.step:,}"
    before = f", {percent(first.pass_at_1)} at step {first.step:,}" if first is not last else ""
    return (
        f"Accuracy, {clean(last.task, limit=24)}",
        percent(last.pass_at_1),
        f"step {last.step:,}, {of_best}{before}",
    )


def _steps_tile(facts: RunFacts) -> tuple[str, str, str]:
    steps = facts.history.steps
    if not steps:
        return ("Steps", "0", "")
    began_at = min(steps[0].time, facts.event_totals.began_at or steps[0].time)
    under = [f"in {duration(steps[-1].time - began_at)}"]
    if len(steps) > 1:
        under.append(f"{number((steps[-1].time - steps[0].time) / (len(steps) - 1))} s per step")
    if idle := sum(point.problem is not None for point in steps):
        under.append(f"{idle} without effect")
    return ("Steps", f"{steps[-1].step:,}", ", ".join(under))


def _why_no_step(facts: RunFacts) -> str:
    """Return why there are no curves; "" if there are steps."""
    role, no_step = facts.status.node.role, "The node has completed no step yet, so there are no curves."
    if facts.history.steps:
        return ""
    if role in {"generator", "exchange"}:
        return f"{no_step} Its role is {role}: it has no learner."
    made, received = (facts.event_totals.traffic.total(kind) for kind in ("made", "received"))
    return f"{no_step} It generated {plural(made, 'group')} and accepted {received:,} from peers. A step needs more."


def render_page(facts: RunFacts) -> str:
    status, history, event_totals = facts.status, facts.history, facts.event_totals
    peers = sorted(facts.peers, key=lambda row: -event_totals.accepted_of[str(row.get("peer_id"))])
    evaluations = list(history.evaluations)
    learning, traffic = run_charts(history, event_totals)
    return render(
        TEMPLATE,
        status=status,
        facts=facts,
        is_running=status.node.state not in {"stopped", "failed", "unknown"},
        why_no_step=_why_no_step(facts),
        tiles=tiles(facts),
        learning=learning,
        traffic=traffic,
        totals={kind: event_totals.traffic.total(kind) for kind in ("made", "announced", "confirmed", "received")},
        refused=[(reason, count, full_sentence(reason)) for reason, count in event_totals.refused.most_common()],
        peers=peers[:MAX_PEERS],
        peers_left_out=max(0, len(peers) - MAX_PEERS),
        evaluations=[*evaluations[:1], *(part[-1] for part in slices(evaluations[1:], MAX_EVALUATIONS - 1))],
        evaluations_left_out=max(0, len(evaluations) - MAX_EVALUATIONS),
        step_rows=[_row(steps) for steps in slices(history.steps, NUM_ROWS)],
        timeline=[(entry, sentence(entry, facts.name_of)) for entry in facts.timeline],
        about=_about(facts),
        problems=facts.compared.problems[:MAX_PROBLEMS] if facts.compared else (),
    )


def _about(facts: RunFacts) -> list[tuple[str, str]]:
    """Return the run's settings without addresses and paths of this machine, because users share reports."""
    status, settings = facts.status, facts.settings
    found = node_facts(NodeSnapshot(taken_at=facts.made_at, status=status)) if status.node.peer_id else ()
    releases = [f"{package} {release}" for package in PACKAGES if (release := installed_release(package))]
    rows = [(label.capitalize(), text_of(shown)) for label, shown in found if label in ABOUT] + [
        ("Peer id", status.node.peer_id),
        ("Tokenizer", status.model.tokenizer_fingerprint),
        ("Engine", status.generation.engine),
        ("Settings", ", ".join(f"{name} {settings[name]}" for name in NODE_SETTINGS if name in settings)),
        ("On the machine of this report", ", ".join([f"Python {platform.python_version()}", *releases])),
    ]
    return [(label, clean(value, limit=200)) for label, value in rows if value]
