"""Model of the view of a swarm: a row for each directory record. Pure; all values are claims of the peers.

The readers of `records/` have bounded every value. Names may contain any character, so a renderer must escape them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ftis_node.config.manifest import RunManifest
from ftis_node.records.envelope import PeerRecord
from ftis_node.swarm.peer_rows import shown_names
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.terminal_text import clipped, columns

MAX_ROWS = 200
MINUTE_S = 60.0
BARS = "▁▂▃▄▅▆▇█"
HEADER = ("name", "id", "role", "model", "step", "groups/min", "tokens/min", "pass@1", "refused", "measured", "seen")
NUM_LEFT = 4  # text columns, aligned left; number columns are aligned right
NAME_WIDTH, MODEL_WIDTH, ID_LENGTH, MAX_MATRIX = 16, 20, 8, 12


def render_views(views: Sequence[SwarmView]) -> list[str]:
    if not views:
        return ["no run is known yet"]
    return [line for place, view in enumerate(views) for line in ([""] if place else []) + render_view(view)]


def render_view(view: SwarmView) -> list[str]:
    """Return the lines of one run: its peers, then the matrix of learners and senders."""
    lines, names = [_title(view)], shown_names({row.peer_id: row.name for row in view.peers}, width=NAME_WIDTH)
    if view.peers:
        lines += columns(HEADER, [_cells(row, names, view.taken_at) for row in view.peers], num_left=NUM_LEFT)
        lines += ["", *_matrix(view, names)]
    if view.num_omitted:
        lines.append(f"{view.num_omitted} more peers are not shown")
    return lines


def sparkline(rates: Iterable[float]) -> str:
    """Return a bar for each rate in [0, 1]."""
    return "".join(BARS[min(int(rate * len(BARS)), len(BARS) - 1)] for rate in rates)


def _title(view: SwarmView) -> str:
    run = view.run
    words = ", ".join(
        f"{label} {clipped(value, 60)}" for label, value in (("task", run.task), ("method", run.method)) if value
    )
    unreadable = f", {view.num_unreadable} without a readable record" if view.num_unreadable else ""
    name = f" ({clipped(run.name, 60)})" if run.name else ""
    count = len(view.peers) + view.num_omitted
    return f"run {clipped(run.id, 32)}{name}: {count} {'peer' if count == 1 else 'peers'}{unreadable}; {words}".rstrip(
        "; "
    )


def _cells(row: SwarmRow, names: Mapping[str, str], now: float) -> tuple[str, ...]:
    last = f" {row.pass_rates[-1][1]:.2f}" if row.pass_rates else "-"
    return (
        names[row.peer_id] or "-",
        short(row),
        row.role or "-",
        clipped(row.model.rsplit("/", 1)[-1] or "-", MODEL_WIDTH),
        "-" if row.step is None else str(row.step),
        "-" if row.groups_per_minute is None else rate_text(row.groups_per_minute),
        rate_text(row.tokens_per_minute),
        sparkline(rate for _, rate in row.pass_rates) + last,
        "-" if row.refused_groups is None else str(row.refused_groups),
        _age(row.measured_at, now),
        _age(row.seen_at, now),
    )


def _age(at: float | None, now: float) -> str:
    return f"{duration(max(0.0, now - at))} ago" if at else "-"


def rate_text(rate: float) -> str:
    """Return a rate as people write it: `4.5`, `3,169`; with an exponent from a billion on."""
    return f"{rate:,.0f}" if 100 <= rate < 1e9 else f"{rate:.3g}"


def short(row: SwarmRow) -> str:
    """Return the end of the peer id, because all ids have the same beginning."""
    return clipped(row.peer_id[-ID_LENGTH:], ID_LENGTH)


def _matrix(view: SwarmView, names: Mapping[str, str]) -> list[str]:
    learners = [row for row in view.peers if row.learns_from][:MAX_MATRIX]
    if not learners:
        return ["who learns from whom: no peer has published a step yet"]
    senders = list(view.peers[:MAX_MATRIX])
    labels = {row.peer_id: names[row.peer_id] or short(row) for row in (*senders, *learners)}
    header, table = ("", *(labels[sender.peer_id] for sender in senders), "others"), []
    for row in learners:
        shares = [row.learns_from.get(sender.peer_id, 0.0) for sender in senders]
        table.append((labels[row.peer_id], *map(_percent, shares), _percent(max(0.0, 1.0 - sum(shares)))))
    title = "who learns from whom (share of the groups of a peer's last steps, by sender):"
    return [title, *columns(header, table, num_left=1)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "-"


class RunSummary(msgspec.Struct, frozen=True):
    """The run of a swarm. Name, task and method are "" if its manifest is unknown."""

    id: str
    name: str = ""
    task: str = ""
    method: str = ""

    @classmethod
    def of(cls, manifest: RunManifest) -> RunSummary:
        return cls(manifest.run_id, manifest.name, manifest.task, manifest.method.name)


class SwarmRow(msgspec.Struct, frozen=True):
    """One peer. The fields from `step` on are None or empty if the peer publishes none.

    `seen_at` and `measured_at` (of the figures, by the peer's clock) are Unix times in seconds. `pass_rates` are pairs
    of a step and pass@1, the oldest first. `learns_from` is the share of each sender among the groups of the peer's
    last steps, by peer id; it sums to at most 1.
    """

    peer_id: str
    name: str
    role: str
    model: str
    parameters: int
    software: str
    seen_at: float
    tokens_per_minute: float
    step: int | None = None
    groups_per_minute: float | None = None
    refused_groups: int | None = None
    pass_rates: tuple[tuple[int, float], ...] = ()
    learns_from: dict[str, float] = {}
    measured_at: float | None = None


class SwarmView(msgspec.Struct, frozen=True):
    """The peers of one run at `taken_at` (Unix time).

    `num_unreadable` counts members without a valid record, `num_omitted` rows beyond the limit of `MAX_ROWS`.
    """

    run: RunSummary
    taken_at: float
    peers: tuple[SwarmRow, ...] = ()
    own_id: str = ""
    num_unreadable: int = 0
    num_omitted: int = 0

    def as_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document

    @classmethod
    def from_dict(cls, document: Any) -> SwarmView:
        """Return the view in a JSON form. Raises msgspec.ValidationError if it is invalid."""
        return msgspec.convert(document, cls)


def swarm_row(record: PeerRecord, *, seen_at: float) -> SwarmRow:
    """Return the row of a record whose signature was checked."""
    row = SwarmRow(
        peer_id=record.peer_id,
        name=record.name,
        role=record.role,
        model=record.model,
        parameters=record.parameters,
        software=record.software,
        seen_at=seen_at,
        tokens_per_minute=round(record.tokens_per_s * MINUTE_S, 1),
        measured_at=record.created_at,
    )
    stats = record.stats
    if stats is None:
        return row
    total = max(stats.trained_groups, sum(groups for _, groups in stats.sources))
    return msgspec.structs.replace(
        row,
        step=stats.step,
        groups_per_minute=round(stats.groups_per_minute, 2),
        refused_groups=stats.refused_groups,
        pass_rates=tuple((step, round(rate, 4)) for step, rate in stats.pass_rates),
        learns_from={peer_id: round(groups / total, 4) for peer_id, groups in stats.sources},
    )


def make_view(
    rows: Sequence[SwarmRow], *, run: RunSummary, now: float, own_id: str = "", num_unreadable: int = 0
) -> SwarmView:
    """Return the view: the node itself first, then the most recently seen peers. `now` is Unix time in seconds."""
    ordered = sorted(rows, key=lambda row: (row.peer_id != own_id, -min(row.seen_at, now), row.peer_id))
    return SwarmView(
        run=run,
        taken_at=now,
        peers=tuple(ordered[:MAX_ROWS]),
        own_id=own_id,
        num_unreadable=num_unreadable,
        num_omitted=max(0, len(ordered) - MAX_ROWS),
    )
