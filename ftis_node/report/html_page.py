"""HTML page: a template renders the facts. The template engine escapes all values; this file bounds them."""

from __future__ import annotations

import platform
from functools import partial
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

from ftis_node.report import formatting, run_summary
from ftis_node.report.run_charts import learning_charts, traffic_chart
from ftis_node.report.timeline import sentence
from ftis_node.swarm.reputation.reasons import full_sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.report.facts import RunFacts
    from ftis_node.telemetry.history import EvaluationPoint

TEMPLATE = "page.html.j2"
STYLE = "page.css"
MAX_PEERS = 60
MAX_EVALUATIONS = 24
PACKAGES = ("torch", "transformers", "vllm", "hivemind")
FILTERS = ("number", "large", "percent", "length", "clock", "short_id", "clean")
NODE_SETTINGS = ("engine", "device", "dtype", "lora", "seed")


def render_page(facts: RunFacts) -> str:
    """Return the page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("ftis_node.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        {
            name: getattr(formatting, name)
            for name in ("number", "large", "percent", "length", "clock", "short_id", "clean")
        }
    )
    style = resources.files("ftis_node.report").joinpath(STYLE).read_text(encoding="utf-8")
    ours = Markup(style)  # nosec B704: a file of this package
    return environment.get_template(TEMPLATE).render(style=ours, **_values(facts))


def _values(facts: RunFacts) -> dict[str, Any]:
    """Return the template's variables."""
    status, history, event_totals = facts.status, facts.history, facts.event_totals
    peers = sorted(facts.peers, key=lambda row: -int(row.get("groups_accepted") or 0))
    evaluations = list(history.evaluations)
    return {
        "status": status,
        "facts": facts,
        "is_running": status.node.state not in {"stopped", "failed", "unknown"},
        "summary": run_summary.summary(facts),
        "tiles": run_summary.tiles(facts),
        "charts": learning_charts(history),
        "traffic": traffic_chart(event_totals),
        "totals": {kind: event_totals.traffic.total(kind) for kind in ("made", "announced", "confirmed", "received")},
        "refused": [(reason, count, full_sentence(reason)) for reason, count in event_totals.refused.most_common()],
        "peers": peers[:MAX_PEERS],
        "peers_left_out": max(0, len(peers) - MAX_PEERS),
        "evaluations": _spread(evaluations, MAX_EVALUATIONS),
        "evaluations_left_out": max(0, len(evaluations) - MAX_EVALUATIONS),
        "step_rows": run_summary.step_rows(history.steps),
        "timeline": [(entry, sentence(entry, partial(_name, facts))) for entry in facts.timeline],
        "about": _about(facts),
    }


def _name(facts: RunFacts, peer_id: str) -> str:
    return facts.name_of(peer_id)


def _spread(points: Sequence[EvaluationPoint], limit: int) -> list[EvaluationPoint]:
    """Return at most `limit` points, evenly spaced, with the first and the last."""
    if len(points) <= limit:
        return list(points)
    return [points[round(place * (len(points) - 1) / (limit - 1))] for place in range(limit)]


def _about(facts: RunFacts) -> list[tuple[str, str]]:
    """Return the run's settings without addresses and paths of this machine, because users share reports."""
    status, settings = facts.status, facts.settings
    rows = [
        ("Run", f"{status.run.name} ({status.run.id})"),
        ("Task", status.run.task),
        ("Method", status.run.method),
        ("Model", status.model.name),
        ("Parameters", f"{status.model.parameters:,}, {status.model.trainable_parameters:,} of them trained"),
        ("Tokenizer", status.model.tokenizer_fingerprint),
        ("Node", f"{status.node.name} ({status.node.peer_id})"),
        ("Role", status.node.role),
        ("Settings", ", ".join(f"{name} {settings[name]}" for name in NODE_SETTINGS if name in settings)),
        ("Engine", status.generation.engine),
        ("ftis-node", status.node.version),
        ("On the machine of this report", ", ".join([f"Python {platform.python_version()}", *_versions()])),
    ]
    return [(label, formatting.clean(value, limit=200)) for label, value in rows if value.strip(" ()")]


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return found
