"""Facts about a run, read once from its home, with bounds on all sizes.

Sample groups: own and foreign groups with the best and the worst rewards, as text if possible.

The tokenizer is `tokenizer.json` of the model, read without transformers. Without it, the page shows token ids.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ftis_node.errors import ConfigError, FileError
from ftis_node.files import read_object, read_text
from ftis_node.models.tokenizer import Decoder
from ftis_node.records.envelope import open_envelope
from ftis_node.records.group import Completion
from ftis_node.records.text_codec import unpack_any
from ftis_node.replay.reader import ReplayReader
from ftis_node.report.event_totals import EventTotals
from ftis_node.report.formatting import clean, short_id
from ftis_node.telemetry.events import EventReader
from ftis_node.telemetry.history import History, HistoryBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ftis_node.config.home import Home
    from ftis_node.records.text_group import TextCompletion
    from ftis_node.replay.reader import GroupSummary
    from ftis_node.report.timeline import TimelineEntry
    from ftis_node.telemetry.status import Status

    OnProgress = Callable[[float, str], None]

LINES_PER_PROGRESS = 20_000
MAX_MANIFEST = 32_768
NUM_CANDIDATES = 2000
MAX_TEXT = 1200
MAX_COMPLETIONS = 6


@dataclass(frozen=True, slots=True)
class SampleCompletion:
    """One completion, which occurs `times` times in the group."""

    times: int
    text: str
    reward: float
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One group. `title` is the reason for its selection. `left_out` counts the completions that are not shown."""

    title: str
    summary: GroupSummary
    prompt: str
    completions: tuple[SampleCompletion, ...]
    left_out: int

    @property
    def reward_mean(self) -> float:
        return _mean(self.summary)


def read_samples(home: Home) -> list[Sample]:
    """Return the best and the worst of the newest groups, own and foreign; an empty list without a buffer."""
    try:
        reader = ReplayReader(home.replay)
    except ConfigError:
        return []
    try:
        decoder = Decoder(home)
        return [_sample(reader, title, summary, decoder) for title, summary in _choose(reader)]
    finally:
        reader.close()


def _choose(reader: ReplayReader) -> list[tuple[str, GroupSummary]]:
    newest = [summary for summary in reader.list_groups(limit=NUM_CANDIDATES) if summary.rewards]
    chosen: dict[str, tuple[str, GroupSummary]] = {}
    for whose, own in (("of this node", True), ("of a peer", False)):
        groups = sorted((summary for summary in newest if summary.own == own), key=_mean)
        if groups:
            chosen.setdefault(groups[-1].id, (f"Best {whose}", groups[-1]))
            chosen.setdefault(groups[0].id, (f"Worst {whose}", groups[0]))
    return list(chosen.values())


def _mean(summary: GroupSummary) -> float:
    return sum(summary.rewards) / len(summary.rewards)


def _sample(reader: ReplayReader, title: str, summary: GroupSummary, decoder: Decoder) -> Sample:
    found = reader.find(summary.id)
    completions: Sequence[Completion | TextCompletion] = ()
    if found is not None:
        completions = unpack_any(open_envelope(found[1]).body).completions
    shown_once = Counter(
        _shown(completion, reward, decoder) for reward, completion in zip(summary.rewards, completions, strict=False)
    )
    ranked = sorted(shown_once.items(), key=lambda pair: (-pair[0].reward, -pair[1]))
    half = MAX_COMPLETIONS // 2
    shown = ranked if len(ranked) <= MAX_COMPLETIONS else [*ranked[:half], *ranked[-half:]]
    prompt_ids = reader.prompt_ids(bytes.fromhex(summary.id))
    return Sample(
        title=title,
        summary=summary,
        prompt=clean(decoder.text(prompt_ids) or f"{summary.task} {summary.prompt_index}", limit=MAX_TEXT),
        completions=tuple(replace(completion, times=times) for completion, times in shown),
        left_out=len(completions) - sum(times for _, times in shown),
    )


def _shown(completion: Completion | TextCompletion, reward: float, decoder: Decoder) -> SampleCompletion:
    if isinstance(completion, Completion):
        ids = completion.token_ids.tolist()
        decoded, num_tokens = decoder.text(ids), len(ids)
        text = "token ids " + " ".join(map(str, ids)) if decoded is None else decoded
    else:
        text, num_tokens = completion.text, completion.num_tokens
    return SampleCompletion(1, clean(text.strip(), limit=MAX_TEXT), reward, num_tokens, str(completion.finish_reason))


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
