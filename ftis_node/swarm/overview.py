"""Model of the view of a swarm: a row for each directory record. Pure; all values are claims of the peers.

The readers of `records/` have bounded every value. Names may contain any character, so a renderer must escape them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ftis_node.config.manifest import RunManifest
from ftis_node.records.envelope import PeerRecord
from ftis_node.records.peer_messages import Receipt, receipt_key
from ftis_node.swarm.receipts import NO_LIMITS, StepLimits, Used, step_limits, totals_by_key

MAX_ROWS = 200
MINUTE_S = 60.0


class RunSummary(msgspec.Struct, frozen=True):
    """The run of a swarm. Name, task and method are "" if its manifest is unknown."""

    id: str
    name: str = ""
    task: str = ""
    method: str = ""
    limits: StepLimits = NO_LIMITS

    @classmethod
    def of(cls, manifest: RunManifest) -> RunSummary:
        return cls(manifest.run_id, manifest.name, manifest.task, manifest.method.name, step_limits(manifest))


class SwarmRow(msgspec.Struct, frozen=True):
    """One peer. The fields from `step` on are None or empty if the peer publishes none.

    `seen_at` and `measured_at` (of the figures, by the peer's clock) are Unix times in seconds. `pass_rates` are pairs
    of a step and pass@1, the oldest first. `learns_from` is the share of each sender among the groups of the peer's
    last steps, by peer id; it sums to at most 1. `used_groups` and `used_tokens` are the sums of the other peers'
    `receipts` for this one.
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
    receipts: tuple[Receipt, ...] = ()
    used_groups: int = 0
    used_tokens: int = 0


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
        for peer in document["peers"]:
            del peer["receipts"]  # `used_groups` has their sums
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
        receipts=stats.receipts,
    )


def make_view(
    rows: Sequence[SwarmRow], *, run: RunSummary, now: float, own_id: str = "", num_unreadable: int = 0
) -> SwarmView:
    """Return the view of the node itself and the most recently seen peers. `now` is Unix time in seconds.

    Its rows are in the order of their rank: by receipts, and without them the node first, then by the last contact.
    """
    signed = [(row.peer_id, row.step or 0, row.receipts) for row in rows]
    totals = totals_by_key(signed, run.limits)
    ranked = []
    for row in rows:
        used = totals.get(receipt_key(row.peer_id), Used())
        ranked.append(msgspec.structs.replace(row, used_groups=used.groups, used_tokens=used.tokens, receipts=()))
    newest = sorted(ranked, key=lambda row: (row.peer_id != own_id, -min(row.seen_at, now), row.peer_id))
    return SwarmView(
        run=run,
        taken_at=now,
        peers=tuple(sorted(newest[:MAX_ROWS], key=lambda row: -row.used_groups)),
        own_id=own_id,
        num_unreadable=num_unreadable,
        num_omitted=max(0, len(newest) - MAX_ROWS),
    )
