"""One page about a swarm: its runs, nodes, accuracy and who learns from whom.

`bootstrap` and `dashboard --swarm --web` serve it, and `swarm --html` writes it. It loads nothing. Its only script
copies the line to join with. Every value is a claim of a peer, so the template escapes it and this file bounds it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from itertools import cycle
from statistics import median
from typing import Any

from ftis_node.records.addresses import block_of
from ftis_node.report.run_charts import Chart, ChartSeries
from ftis_node.report.templates import clean, own_file, render
from ftis_node.swarm.overview import SwarmView
from ftis_node.telemetry.health_summary import plural
from ftis_node.view.formats import CURVES, ago, count, percent
from ftis_node.view.swarm import (
    Influence,
    bounded,
    influences,
    is_active,
    names_of,
    rank_text,
    rate_text,
    short,
    sorted_nodes,
    totals,
)

TEMPLATE, SCRIPT = "swarm.html.j2", "copy.js"
MAX_RUNS, MAX_LISTED, MAX_CELLS, MAX_LEGEND, MAX_ADDRESSES = 8, 100, 40, 10, 3
NAME_WIDTH, MODEL_WIDTH = 20, 24
FAR = 4.0  # a point of a curve may be this many times as far as half of the nodes are
REFRESH_S = 10
ADDRESS = re.compile(r"/[\w.:/-]{1,300}")


def script_hash(script: str) -> str:
    """Return the hash by which the content policy allows the script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _join_line(view: SwarmView, addresses: Sequence[str]) -> str:
    safe = [one for one in addresses if ADDRESS.fullmatch(one)]
    chosen = [one for one in safe if (block := block_of(one)) is not None and block.is_public] or safe
    peers = "".join(f" --peers {one}" for one in chosen[:MAX_ADDRESSES])
    return f"ftis-node join --model MODEL --run {clean(view.run.id, limit=32)}{peers}" if peers else ""


def _run(view: SwarmView, join_line: str, *, now: float) -> dict[str, Any]:
    """Return the values of one run for the template."""
    total, names = totals(view, now=now), names_of(view, width=NAME_WIDTH)
    found = influences(view)
    tiles = [
        ("Nodes", f"{total.num_active:,}", f"active, of {total.num_nodes:,} known"),
        ("Groups a minute", rate_text(total.groups_per_minute), "of active nodes"),
        ("Tokens a minute", rate_text(total.tokens_per_minute), "completion tokens, of active nodes"),
    ]
    if total.best is not None:
        tiles.append(("Best accuracy", percent(round(total.best, 3)), "pass@1 of one node's last evaluation"))
    if total.used_groups:
        groups = plural(total.used_groups, "group")
        tiles.append(("Tokens used so far", count(total.used_tokens), f"in {groups} of other nodes, by receipts"))
    rows = [
        {
            "name": names[row.peer_id] or "unnamed",
            "id": short(row),
            "peer_id": clean(row.peer_id, limit=80),
            "is_own": row.peer_id == view.own_id,
            "is_active": is_active(row, now=now),
            "role": clean(row.role or "–", limit=12),
            "model": clean(row.model.rsplit("/", 1)[-1] or "–", limit=MODEL_WIDTH),
            "step": "–" if row.step is None else count(bounded(row.step)),
            "groups": "–" if row.groups_per_minute is None else rate_text(row.groups_per_minute),
            "tokens": rate_text(row.tokens_per_minute),
            "accuracy": percent(round(row.pass_rates[-1][1], 3)) if row.pass_rates else "–",
            "learners": _learners(found.get(row.peer_id)),
            "used": count(bounded(row.used_groups)),
            "as_of": ago(row.measured_at, now) if row.measured_at else "–",
            "seen": ago(row.seen_at, now),
        }
        for row in sorted_nodes(view, None)[:MAX_LISTED]
    ]
    chart = _accuracy(view, names)
    return {
        "id": clean(view.run.id, limit=32),
        "name": clean(view.run.name, limit=60) or "Unnamed run",
        "task": clean(view.run.task, limit=60),
        "method": clean(view.run.method, limit=24),
        "age": f"as of {ago(view.taken_at, now)} ago",
        "tiles": tiles,
        "rank": rank_text(view),
        "join_line": join_line,
        "charts": [chart] if chart.is_drawn else [],
        "rows": rows,
        "left_out": max(0, total.num_nodes - len(rows)),
        "num_unreadable": view.num_unreadable,
        "heat": _heat(view, names),
    }


def _learners(influence: Influence | None) -> str:
    if influence is None:
        return "–"
    return f"{plural(influence.num_learners, 'node')}, {percent(round(influence.share, 3))}"


def _accuracy(view: SwarmView, names: dict[str, str]) -> Chart:
    """Return the chart of pass@1 by step. It leaves out points far beyond the steps of most nodes."""
    last_steps = [bounded(row.pass_rates[-1][0]) for row in view.peers if row.pass_rates]
    limit = FAR * max(1.0, median(last_steps)) if last_steps else 0.0
    known = sorted((row for row in view.peers if row.pass_rates), key=lambda row: -row.pass_rates[-1][1])
    series = [
        ChartSeries(
            (names[row.peer_id] or short(row)) if place < MAX_LEGEND else "",
            color,
            [(bounded(step), min(1.0, bounded(rate))) for step, rate in row.pass_rates if bounded(step) <= limit],
        )
        for place, (row, color) in enumerate(zip(known, cycle(CURVES), strict=False))
    ]
    more = f" {len(known) - MAX_LEGEND} more nodes have no name in the legend." if len(known) > MAX_LEGEND else ""
    note = f"Greedy pass@1 on held-out problems by the step of each node, the best first.{more}"
    return Chart("Accuracy of all nodes", note, series, write=percent, is_wide=True)


def _heat(view: SwarmView, names: dict[str, str]) -> dict[str, Any] | None:
    """Return the shares of senders (columns) among the groups of each learner (rows), the most influential first."""
    learners = [row for row in view.peers if row.learns_from][:MAX_CELLS]
    if not learners:
        return None
    ranked = [*influences(view), *(row.peer_id for row in learners)]
    by_id = {row.peer_id: row for row in view.peers}
    senders = [peer_id for peer_id in dict.fromkeys(ranked) if peer_id in by_id][:MAX_CELLS]
    rows = []
    for row in sorted(learners, key=lambda row: senders.index(row.peer_id) if row.peer_id in senders else MAX_CELLS):
        shares = [min(1.0, bounded(row.learns_from.get(peer_id))) for peer_id in senders]
        cells = [(round(share, 3), peer_id == row.peer_id) for peer_id, share in zip(senders, shares, strict=True)]
        rows.append({"id": short(row), "name": names[row.peer_id], "cells": cells, "others": max(0.0, 1 - sum(shares))})
    return {"senders": [(short(by_id[one]), names[one]) for one in senders], "rows": rows}


def swarm_page(
    views: Sequence[SwarmView], *, addresses: Sequence[str] = (), note: str = "", is_live: bool = True
) -> str:
    """Return the page. `addresses` are those to join with, public ones first. A live page loads itself again."""
    now, script = time.time(), own_file(SCRIPT)
    return render(
        TEMPLATE,
        runs=[_run(view, _join_line(view, addresses), now=now) for view in views[:MAX_RUNS]],
        note=note,
        refresh_s=REFRESH_S if is_live else None,
        made_at=now,
        script=script,
        script_hash=script_hash(script),
    )
