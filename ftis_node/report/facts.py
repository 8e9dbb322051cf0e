"""Facts about a run, read once from its home, with bounds on all sizes.

Sample groups are those with the best and the worst rewards, as text, or as token ids without `tokenizer.json`. Answers
before and after training come from a file that `ftis-node eval --home H --show 5 --json` printed.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ftis_node.config.home import Home
from ftis_node.config.home_files import last_settings
from ftis_node.errors import ConfigError, FileError, UsageError
from ftis_node.files import read_text
from ftis_node.models.decoder import Decoder
from ftis_node.records.codec import unpack_any
from ftis_node.records.envelope import open_envelope
from ftis_node.replay.group_history import CompletionDetails, read_completions
from ftis_node.replay.reader import GroupSummary, ReplayReader
from ftis_node.report.templates import clean, without_paths
from ftis_node.report.timeline import TimelineBuilder, TimelineEntry
from ftis_node.telemetry.history import ROUTINE, EventHead, History, HistoryReader, read_event
from ftis_node.telemetry.log import OnProgress
from ftis_node.telemetry.status import Status
from ftis_node.view.formats import short_id
from ftis_node.view.groups import distinct

MAX_PROBLEMS, MAX_ANSWER = 5, 600
LINES_PER_PROGRESS = 20_000
MAX_MANIFEST = 32_768
NUM_CANDIDATES = 2000
MAX_TEXT = 1200
MAX_COMPLETIONS = 6
MAX_REASONS = 64
MAX_COUNTED_PEERS = 4096
NUM_BUCKETS = 48
COUNTED = {"announced", "confirmed", "refused"}


class EventTimes:
    """Times of events by kind, in Unix seconds: 8 bytes an event."""

    def __init__(self) -> None:
        self._times: dict[str, array[float]] = {}

    def add(self, kind: str, at: float) -> None:
        self._times.setdefault(kind, array("d")).append(at)

    def rates(self, kind: str) -> list[tuple[float, float]]:
        """Return (middle of a bucket in Unix s, events per minute) for buckets of equal width over all kinds."""
        known = self._times.values()
        ends = (min(map(min, known)), max(map(max, known)))
        counts, edges = np.histogram(self._times[kind], bins=NUM_BUCKETS, range=ends)
        per_minute = counts * 60 / (edges[1] - edges[0])
        return list(zip(((edges[:-1] + edges[1:]) / 2).tolist(), per_minute.tolist(), strict=True))

    def total(self, kind: str) -> int:
        return len(self._times.get(kind, ()))


class EventTotals:
    """Accumulator over the lines of an event log, in their order."""

    def __init__(self) -> None:
        self.traffic = EventTimes()
        self.refused: Counter[str] = Counter()
        self.accepted_of: Counter[str] = Counter()  # groups by the peer's id, as the next one
        self.refused_of: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()  # completion tokens by "made" and "received"
        self.turns = self.observations = 0  # of episodes, made and received
        self.num_events = 0
        self.began_at: float | None = None
        self.ended_at: float | None = None
        self.timeline = TimelineBuilder()

    def add(self, line: bytes, head: EventHead) -> None:
        name = head.event
        self.num_events += 1
        self.began_at = head.time if self.began_at is None else self.began_at
        self.ended_at = head.time
        if name == "admitted":
            kind = "made" if head.own else "received"
            self.traffic.add(kind, head.time)
            self.tokens[kind] += head.num_tokens
            if not head.own:
                self._count_peer(self.accepted_of, head.sender)
            self.turns += head.num_turns
            self.observations += head.num_observations
        elif name in COUNTED:
            self.traffic.add(name, head.time)
        reason = head.reason
        if name == "refused":
            self._count_peer(self.refused_of, head.origin or "")
            if reason in self.refused or len(self.refused) < MAX_REASONS:
                self.refused[reason] += 1
        if name not in ROUTINE:
            self.timeline.add(read_event(line))

    def _count_peer(self, counts: Counter[str], peer_id: str) -> None:
        if peer_id in counts or len(counts) < MAX_COUNTED_PEERS:
            counts[peer_id] += 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One group. `title` is the reason for its selection. `completions` are distinct, each with its number.

    `left_out` counts the completions that are not shown.
    """

    title: str
    summary: GroupSummary
    prompt: str
    completions: Sequence[tuple[CompletionDetails, int]]
    left_out: int


def read_samples(home: Home) -> list[Sample]:
    """Return the best and the worst of the newest groups, own and foreign; an empty list without a buffer."""
    try:
        reader = ReplayReader(home.replay)
    except ConfigError:
        return []
    with closing(reader):
        decoder = Decoder(home)
        return [_sample(reader, title, summary, decoder) for title, summary in _choose(reader)]


def _choose(reader: ReplayReader) -> list[tuple[str, GroupSummary]]:
    newest = [summary for summary in reader.list_groups(limit=NUM_CANDIDATES) if summary.rewards]
    chosen: dict[str, tuple[str, GroupSummary]] = {}
    for whose, own in (("of this node", True), ("of a peer", False)):
        groups = sorted((summary for summary in newest if summary.own == own), key=lambda summary: summary.reward_mean)
        if groups:
            chosen.setdefault(groups[-1].id, (f"Best {whose}", groups[-1]))
            chosen.setdefault(groups[0].id, (f"Worst {whose}", groups[0]))
    return list(chosen.values())


def _sample(reader: ReplayReader, title: str, summary: GroupSummary, decoder: Decoder) -> Sample:
    found = reader.find(summary.id)
    completions: Sequence[CompletionDetails] = ()
    if found is not None:
        group = unpack_any(open_envelope(found[1]).body)
        observations = reader.observation_ids(bytes.fromhex(summary.id))
        completions = read_completions(group, summary.rewards, decoder, observations)
    shown_once = [(one, len(places)) for places, one in distinct(completions)]
    ranked = sorted(shown_once, key=lambda pair: (-pair[0].reward, -pair[1]))
    half = MAX_COMPLETIONS // 2
    shown = ranked if len(ranked) <= MAX_COMPLETIONS else [*ranked[:half], *ranked[-half:]]
    prompt_ids = reader.prompt_ids(bytes.fromhex(summary.id))
    return Sample(
        title=title,
        summary=summary,
        prompt=clean(decoder.text(prompt_ids) or f"{summary.task} {summary.prompt_index}", limit=MAX_TEXT),
        completions=shown,
        left_out=len(completions) - sum(times for _, times in shown),
    )


class GivenAnswer(msgspec.Struct, frozen=True):
    text: str
    is_right: bool


class AnsweredProblem(msgspec.Struct, frozen=True):
    problem: str
    right_answer: str
    before: GivenAnswer
    after: GivenAnswer

    def shown(self) -> dict[str, str]:
        texts = {"problem": self.problem, "correct": self.right_answer}
        texts |= {"before": self.before.text, "after": self.after.text}
        return {name: clean(text.strip(), limit=MAX_ANSWER) for name, text in texts.items()}


class Accuracy(msgspec.Struct, frozen=True):
    model: str
    pass_at_1: float
    n: int

    @property
    def name(self) -> str:
        return clean(without_paths(self.model), limit=60)


class ChangedProblems(msgspec.Struct, frozen=True):
    gained: int
    lost: int


class Compared(Accuracy, frozen=True, kw_only=True):
    """An evaluation of two models: the fields of `Accuracy` are of the trained one, `compared` is the other."""

    task: str
    compared: Accuracy
    problems: tuple[AnsweredProblem, ...]
    difference: ChangedProblems | None = None


def read_compared(path: Path) -> Compared:
    """Return the evaluation in the file. Raises UsageError for another file."""
    try:
        return msgspec.json.decode(read_text(path), type=Compared)
    except (OSError, FileError, msgspec.DecodeError) as error:
        command = "ftis-node eval --model TRAINED --task SPEC --compare BASE --show 5 --json"
        raise UsageError(f"{path} cannot be used ({error}): write it with `{command}`") from None


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
    compared: Compared | None = None
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
    timeline, left_out = event_totals.timeline.finish()
    on_progress(1.0, "sample groups")
    return RunFacts(
        status=status,
        history=history,
        event_totals=event_totals,
        peers=peers,
        settings=last_settings(home),
        manifest=read_text(home.run_toml)[:MAX_MANIFEST] if home.run_toml.exists() else "",
        samples=read_samples(home),
        timeline=timeline,
        timeline_left_out=left_out,
    )


def _read_trail(path: Path, on_progress: OnProgress) -> tuple[History, EventTotals]:
    reader, event_totals = HistoryReader(path, num_last_events=0), EventTotals()
    num_bytes = max(1, sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")))
    num_read = 0
    for position, (line, head) in enumerate(reader.read_new()):
        num_read += len(line)
        if position % LINES_PER_PROGRESS == 0:
            on_progress(min(1.0, num_read / num_bytes), "events")
        if head is not None:
            event_totals.add(line, head)
    return reader.build(), event_totals
