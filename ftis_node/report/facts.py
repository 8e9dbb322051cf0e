"""Facts about a run, read once from its home, with bounds on all sizes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftis_node.errors import FileError
from ftis_node.files import read_object, read_text
from ftis_node.report.event_totals import EventTotals
from ftis_node.report.formatting import clean, short_id
from ftis_node.report.samples import Sample, read_samples
from ftis_node.telemetry.events import EventReader
from ftis_node.telemetry.history import History, HistoryBuilder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftis_node.config.home import Home
    from ftis_node.report.timeline import TimelineEntry
    from ftis_node.telemetry.status import Status

    OnProgress = Callable[[float, str], None]

LINES_PER_PROGRESS = 20_000
MAX_MANIFEST = 32_768


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Content of the page. `status` and `peers` are those that the commands print.

    `timeline_left_out` counts the notable events that exceed the limit.
    """

    status: Status
    history: History
    event_totals: EventTotals
    peers: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    manifest: str = ""
    samples: list[Sample] = field(default_factory=list)
    timeline: list[TimelineEntry] = field(default_factory=list)
    timeline_left_out: int = 0
    made_at: float = field(default_factory=time.time)

    def name_of(self, peer_id: str) -> str:
        """Return a peer's name with the end of its id, because several peers may have one name."""
        for row in self.peers:
            if row.get("peer_id") == peer_id and row.get("name"):
                return f"{clean(row['name'], limit=32)} ({short_id(peer_id)})"
        return short_id(peer_id)


def gather(home: Home, *, status: Status, peers: list[dict[str, Any]], on_progress: OnProgress) -> RunFacts:
    """Return the facts from the home's files. `status` and `peers` are the node's current or last ones."""
    history, event_totals = _read_trail(home.events, on_progress)
    timeline, left_out = event_totals.timeline()
    on_progress(1.0, "sample groups")
    return RunFacts(
        status=status,
        history=history,
        event_totals=event_totals,
        peers=peers,
        settings=_settings(home.settings),
        manifest=read_text(home.run_toml)[:MAX_MANIFEST] if home.run_toml.exists() else "",
        samples=read_samples(home),
        timeline=timeline,
        timeline_left_out=left_out,
    )


def _read_trail(path: Path, on_progress: OnProgress) -> tuple[History, EventTotals]:
    """Read the event log once, for history and totals."""
    builder, event_totals = HistoryBuilder(num_last_events=0), EventTotals()
    num_bytes = max(1, sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")))
    num_read = 0
    for position, line in enumerate(EventReader(path).read_new()):
        num_read += len(line)
        if position % LINES_PER_PROGRESS == 0:
            on_progress(min(1.0, num_read / num_bytes), "events")
        if name := builder.add(line):
            event_totals.add(line, name)
    return builder.build(), event_totals


def _settings(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, FileError):
        return {}
