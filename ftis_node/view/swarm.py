"""The whole swarm: totals, a row for each node, who learns from whom, the own rank. All values are claims of peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftis_node.swarm.overview import SwarmRow, SwarmView
from ftis_node.swarm.peer_rows import shown_names
from ftis_node.telemetry.health_summary import plural
from ftis_node.telemetry.terminal_text import cells, clipped, columns
from ftis_node.view.formats import ago, count, percent
from ftis_node.view.spans import Line, Span, Tone, labeled, line, text_lines, text_of

BARS = "▁▂▃▄▅▆▇█"
LEAST_SPAN = 0.02  # keeps noise on a flat sparkline small
SWARM_COLUMNS = tuple("name,id,model,step,pass@1,groups/min,tokens/min,used,seen,as of,role".split(","))
NUM_LEFT = 3  # text columns, aligned left; number columns are aligned right
NAME_WIDTH, MODEL_WIDTH, TITLE_WIDTH, ID_LENGTH, NUM_BARS = 12, 12, 60, 8, 8
TEXT_WIDTH = 120
ACTIVE_S = 300.0
OLD_S = 60.0
NUM_SOURCES, MAX_LEARNERS = 4, 60
MOST = 10**15  # of a number of a peer; larger ones are shown as this


@dataclass(frozen=True, slots=True)
class SwarmTotals:
    """Sums over the nodes. `num_active` were seen within `ACTIVE_S`, and the rates are theirs.

    `used_groups` and `used_tokens` are those of others on which nodes have trained so far, by receipts.
    """

    num_nodes: int
    num_active: int
    groups_per_minute: float
    tokens_per_minute: float
    best: float | None  # highest last pass@1
    used_groups: int
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Influence:
    """The other nodes whose last steps used groups of a sender, and its share of all foreign groups in such steps."""

    num_learners: int
    share: float


def bounded(value: float | None) -> float:
    """Return a peer's number between 0 and `MOST`; 0 for None and NaN."""
    return 0.0 if value is None or value != value else float(min(max(value, 0), MOST))


def totals(view: SwarmView, *, now: float) -> SwarmTotals:
    active = [row for row in view.peers if is_active(row, now=now)]
    return SwarmTotals(
        num_nodes=len(view.peers) + view.num_omitted + view.num_unreadable,
        num_active=len(active),
        groups_per_minute=sum(bounded(row.groups_per_minute) for row in active),
        tokens_per_minute=sum(bounded(row.tokens_per_minute) for row in active),
        best=max((row.pass_rates[-1][1] for row in view.peers if row.pass_rates), default=None),
        used_groups=sum(int(bounded(row.used_groups)) for row in view.peers),
        used_tokens=sum(int(bounded(row.used_tokens)) for row in view.peers),
    )


def is_active(row: SwarmRow, *, now: float) -> bool:
    return now - row.seen_at < ACTIVE_S


def influences(view: SwarmView) -> dict[str, Influence]:
    """Return the influence of each sender on the other nodes, the largest first."""
    shares: dict[str, list[float]] = {}
    for row in view.peers:
        for sender, share in row.learns_from.items():
            if sender != row.peer_id and share > 0:
                shares.setdefault(sender, []).append(share)
    whole = sum(map(sum, shares.values()))
    found = {sender: Influence(len(parts), sum(parts) / whole) for sender, parts in shares.items()}
    return dict(sorted(found.items(), key=lambda pair: (-pair[1].share, pair[0])))


def rank_text(view: SwarmView) -> str:
    """Return the place of this node among the senders, by receipts if there are any; "" if it has no row."""
    own_row = next((row for row in view.peers if row.peer_id == view.own_id), None)
    if own_row is None:
        return ""
    if any(row.used_groups for row in view.peers):
        place = 1 + sum(row.used_groups > own_row.used_groups for row in view.peers)
        groups = plural(int(bounded(own_row.used_groups)), "group")
        return f"rank {place} of {len(view.peers)} by receipts: others trained on {groups} of this node"
    found = influences(view)
    if (own := found.get(view.own_id)) is None:
        return "no other node has learned from this one in its last steps"
    place = list(found).index(view.own_id) + 1
    nodes, share = plural(own.num_learners, "node"), percent(round(own.share, 3))
    return f"rank {place} of {len(view.peers)}: {nodes} learned from it, {share} of what nodes learned from others"


def names_of(view: SwarmView, *, width: int = NAME_WIDTH) -> dict[str, str]:
    return shown_names({row.peer_id: row.name for row in view.peers}, width=width)


def short(row: SwarmRow) -> str:
    """Return the end of the peer id, because all ids have the same beginning."""
    return clipped(row.peer_id[-ID_LENGTH:], ID_LENGTH)


def sparkline(rates: Sequence[float]) -> str:
    """Return a bar for each value, scaled to their range."""
    low, high = min(rates, default=0.0), max(rates, default=0.0)
    span = max(high - low, LEAST_SPAN)
    return "".join(BARS[min(int((rate - low) / span * len(BARS)), len(BARS) - 1)] for rate in rates)


def title_lines(view: SwarmView, *, now: float) -> list[Line]:
    """Return the run, the totals and the rank of the own node."""
    run, total = view.run, totals(view, now=now)
    name = f" ({clipped(run.name, TITLE_WIDTH)})" if run.name else ""
    about = [
        f"{key} {clipped(value, TITLE_WIDTH)}" for key, value in (("task", run.task), ("method", run.method)) if value
    ]
    unreadable = f", {view.num_unreadable} without a readable record" if view.num_unreadable else ""
    old = f", as of {ago(view.taken_at, now)} ago" if now - view.taken_at > OLD_S else ""
    best = "" if total.best is None else f", best pass@1 {total.best:.2f}"
    lines = [
        line(Span(f"run {clipped(run.id, 32)}{name}", Tone.STRONG), "; " if about else "", ", ".join(about)),
        line(
            f"{plural(total.num_nodes, 'node')}, {total.num_active} active{unreadable}{old}: "
            f"{rate_text(total.groups_per_minute)} groups/min, {rate_text(total.tokens_per_minute)} tokens/min{best}"
        ),
    ]
    return [*lines, line(rank)] if (rank := rank_text(view)) else lines


def node_row(row: SwarmRow, names: Mapping[str, str], *, now: float, own_id: str) -> Line:
    """Return one cell for each of SWARM_COLUMNS."""
    rates = [rate for _, rate in row.pass_rates]
    tone = Tone.PLAIN if is_active(row, now=now) else Tone.FAINT
    return line(
        Span(names[row.peer_id] or "-", Tone.GOOD if row.peer_id == own_id else Tone.STRONG),
        short(row),
        Span(clipped(row.model.rsplit("/", 1)[-1] or "-", MODEL_WIDTH), tone),
        "-" if row.step is None else count(bounded(row.step)),
        f"{sparkline(rates[-NUM_BARS:])} {rates[-1]:.2f}" if rates else "-",
        "-" if row.groups_per_minute is None else rate_text(row.groups_per_minute),
        rate_text(row.tokens_per_minute),
        count(bounded(row.used_groups)),
        Span(ago(row.seen_at, now), tone),
        Span(ago(row.measured_at, now) if row.measured_at else "-", tone),
        clipped(row.role or "-", 9),
    )


def node_lines(row: SwarmRow, view: SwarmView, *, now: float) -> list[Line]:
    """Return all values of one node, each line after a label."""
    names, found = names_of(view, width=32), influences(view).get(row.peer_id)
    others = [one for one in view.peers if one.peer_id != row.peer_id]
    learners = [names[one.peer_id] or short(one) for one in others if one.learns_from.get(row.peer_id)]
    rates = ", ".join(f"{rate:.3f} at step {count(bounded(step))}" for step, rate in row.pass_rates[-NUM_BARS:])
    return [
        labeled("peer id", row.peer_id),
        labeled("name", Span(row.name or "none given", Tone.STRONG)),
        labeled("model", f"{row.model or '-'}, {count(bounded(row.parameters))} parameters, {row.role or '-'}"),
        labeled("version", row.software or "-"),
        labeled("seen", f"{ago(row.seen_at, now)} ago"),
        labeled("pass@1", rates or "-"),
        labeled("learns from", sources_text(row, names) or "no step published"),
        labeled("learners", ", ".join(learners) or "nobody in the last steps"),
        labeled(
            "used", f"{count(bounded(row.used_groups))} groups, {count(bounded(row.used_tokens))} tokens, by receipts"
        ),
        labeled("refused", "-" if row.refused_groups is None else f"{count(bounded(row.refused_groups))} groups"),
        labeled("share", f"{percent(found.share if found else 0.0)} of the groups that nodes learned from others"),
    ]


def sources_text(row: SwarmRow, names: Mapping[str, str]) -> str:
    """Return the senders of the groups of a node's last steps, the largest first; "" without a step."""
    ranked = sorted(row.learns_from.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [
        f"{'itself' if sender == row.peer_id else names.get(sender) or '…' + sender[-ID_LENGTH:]} {share:.0%}"
        for sender, share in ranked[:NUM_SOURCES]
    ]
    rest = 1.0 - sum(share for _, share in ranked[:NUM_SOURCES])
    return ", ".join([*shown, f"others {rest:.0%}"] if rest >= 0.005 and shown else shown)


def learning_lines(view: SwarmView) -> list[Line]:
    """Return who learns from whom: the largest senders of each node."""
    names, learners = names_of(view), [row for row in view.peers if row.learns_from]
    if not learners:
        return [line(Span("who learns from whom: no node has published a step yet", Tone.FAINT))]
    lines = [line(Span("who learns from whom (senders of the groups of a node's last steps)", Tone.STRONG))]
    for row in learners[:MAX_LEARNERS]:
        name = names[row.peer_id] or short(row)
        label = name + " " * (NAME_WIDTH + 2 - cells(name))
        lines.append(line(Span(label, Tone.FAINT), sources_text(row, names)))
    more = len(learners) - MAX_LEARNERS
    return [*lines, line(Span(f"{more} more are not shown", Tone.FAINT))] if more > 0 else lines


def swarm_text(views: Iterable[SwarmView], *, now: float) -> list[str]:
    """Return the views as text, at most TEXT_WIDTH wide except for the table."""
    lines: list[str] = []
    for view in views:
        names = names_of(view)
        rows = [[span.text for span in node_row(row, names, now=now, own_id=view.own_id)] for row in view.peers]
        lines += [""] if lines else []
        lines += [text_of(one) for one in title_lines(view, now=now)]
        if rows:
            lines += ["", *columns(SWARM_COLUMNS, rows, num_left=NUM_LEFT), ""]
            lines += text_lines(learning_lines(view), TEXT_WIDTH)
        if view.num_omitted:
            lines.append(f"{view.num_omitted} more nodes are not shown")
    return lines or ["no run is known yet"]


def rate_text(rate: float) -> str:
    """Return a rate as people write it: `4.5`, `3,169`, `1.2M`."""
    rate = bounded(rate)
    return count(rate) if rate >= 1e5 else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


SWARM_ORDERS: dict[str, Callable[[SwarmRow], Any]] = {
    "seen": lambda row: -row.seen_at,
    "tokens/min": lambda row: -bounded(row.tokens_per_minute),
    "groups/min": lambda row: -bounded(row.groups_per_minute),
    "pass@1": lambda row: -(row.pass_rates[-1][1] if row.pass_rates else -math.inf),
    "step": lambda row: -bounded(row.step),
    "used": lambda row: -bounded(row.used_groups),
    "name": lambda row: row.name.casefold(),
    "model": lambda row: row.model.casefold(),
}


def sorted_nodes(view: SwarmView, by: str | None) -> list[SwarmRow]:
    """Return the rows by a column of `SWARM_ORDERS`; None keeps the order of the view."""
    return list(view.peers) if by is None else sorted(view.peers, key=lambda row: (SWARM_ORDERS[by](row), row.peer_id))
