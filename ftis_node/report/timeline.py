"""Notable events of a run as sentences. Consecutive events of one kind become one sentence.

Memory is bounded for a run of any length: the last entries are kept, and the earlier ones are only counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftis_node.report.templates import clean, without_paths

MERGE_GAP_S = 90.0
BURST = 10  # fewer consecutive refusals give no entry
MAX_ENTRIES = 200
MAX_SUBJECTS = 4


@dataclass(slots=True)
class TimelineEntry:
    """One or more consecutive events of a kind. `tone` is good, bad or plain; `counts` has the events' subjects."""

    kind: str
    tone: str
    began_at: float
    ended_at: float
    first: dict[str, Any]
    last: dict[str, Any]
    count: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class TimelineBuilder:
    """Accumulator that turns events, in their order, into timeline entries."""

    def __init__(self) -> None:
        self._entries = deque[TimelineEntry](maxlen=MAX_ENTRIES)
        self._num_entries = self._num_starts = 0
        self._open: dict[str, TimelineEntry] = {}
        self._is_up = False

    def add(self, event: dict[str, Any]) -> None:
        """Add an event of any kind; events that are not notable are ignored."""
        kind = self._kind_of(event)
        if kind is None:
            return
        at, entry = float(event["time"]), self._open.get(kind)
        if entry is None or at - entry.ended_at > MERGE_GAP_S or kind in NEVER_MERGED:
            entry = self._open[kind] = TimelineEntry(kind, KINDS[kind].tone, at, at, event, event)
        entry.ended_at, entry.last = max(at, entry.began_at), event
        entry.count += 1
        if entry.count == (BURST if kind == "refused" else 1):
            self._entries.append(entry)
            self._num_entries += 1
        subject = str(event.get(KINDS[kind].subject, ""))
        if subject in entry.counts or len(entry.counts) < 64:
            entry.counts[subject] += 1

    def finish(self) -> tuple[list[TimelineEntry], int]:
        """Return the last entries, oldest first, and the number of omitted ones."""
        kept = sorted(self._entries, key=lambda entry: entry.began_at)
        return kept, self._num_entries - len(kept)

    def _kind_of(self, event: dict[str, Any]) -> str | None:
        name = str(event["event"])
        if name == "start":
            was_up, self._is_up = self._is_up, True
            self._num_starts += 1
            return "start" if self._num_starts == 1 else "crashed" if was_up else "restart"
        if name == "stop":
            self._is_up = False
        if name == "step":
            if event.get("refused") or event.get("skipped"):
                return "step_refused" if event.get("refused") else "step_skipped"
            for kind in ("step_skipped", "step_refused"):  # a step with an effect ends their sequence
                self._open.pop(kind, None)
        if name == "mismatch":
            return f"mismatch_{'rose' if event.get('change') == 'rose' else 'fell'}"
        if name == "reputation_changed":
            name = f"trust_{event.get('trust_level')}"
        return name if name in KINDS else None


class Kind(NamedTuple):
    """Kind of entries. `text` is a sentence with names of fields of the first event, and of `sentence`.

    `subject` is the field whose values an entry counts. `has_cause` appends the error or reason of the last event.
    """

    tone: str
    text: str
    subject: str = ""
    has_cause: bool = True


NEVER_MERGED = {"start", "restart", "crashed", "stop", "trust_banned"}
CAUSES = ("error", "problem", "detail", "reason")
KINDS = {
    "start": Kind("good", "Started"),
    "restart": Kind("good", "Restarted"),
    "crashed": Kind("bad", "Restarted after an end without a stop event (killed, or the machine went down)"),
    "stop": Kind("plain", "Stopped at step {step}", has_cause=False),
    "step_skipped": Kind("plain", "No signal: {steps} had no effect ({skipped})", has_cause=False),
    "step_refused": Kind("bad", "The update was refused, {steps}: {refused}", has_cause=False),
    "step_lost": Kind("bad", "The learner lost step {step} and repeats it"),
    "generation_failed": Kind("bad", "A group was not generated"),
    "eval_failed": Kind("bad", "Step {step} was not evaluated"),
    "weight_sync_failed": Kind("bad", "Weights {version} did not reach the generator, which was restarted"),
    "weight_check_failed": Kind("bad", "The generator does not serve the weights that it received"),
    "check_failed": Kind("bad", "Engine and learner could not be compared"),
    "checkpoint_skipped": Kind("bad", "A checkpoint was skipped"),
    "mismatch_rose": Kind("bad", "Engine and learner disagree more than allowed, since step {step}"),
    "mismatch_fell": Kind("good", "Engine and learner agree again, since step {step}"),
    "trust_banned": Kind("bad", "{who} is banned: {why}", "peer", has_cause=False),
    "trust_probation": Kind("plain", "On probation: {who}", "peer"),
    "trust_good": Kind("good", "No longer on probation or banned: {who}", "peer"),
    "refused": Kind("bad", "{count} groups refused: {tally}", "reason", has_cause=False),
    "pull_given_up": Kind("plain", "No peer sent {count} announced groups, announced by {who}", "source", False),
    "weights_failed": Kind("bad", "Weights {version} could not be fetched"),
    "peer_refused": Kind("bad", "Groups of {who} are refused", "peer"),
    "refused_by": Kind("bad", "{who} refuses the groups of this node", "peer"),
    "weights_refused": Kind("bad", "Weights from {who} were refused", "peer"),
    "learner_away": Kind("bad", "The learner that this node follows does not answer"),
    "learner_back": Kind("good", "The learner that this node follows answers again"),
    "paused": Kind("bad", "Paused generation and fetching: the disk limit was reached"),
    "resumed": Kind("good", "Resumed: disk space is available"),
    "pause_began": Kind("plain", "Paused"),
    "pause_ended": Kind("good", "Resumed after {paused_s} s", has_cause=False),
    "peer_joined": Kind("good", "Joined: {who}", "peer"),
    "peer_left": Kind("plain", "Left: {who}", "peer"),
    "failed": Kind("bad", "Ended with a fault"),
    "loop_blocked": Kind("bad", "The event loop was blocked"),
    "recovered": Kind("bad", "{file} was damaged or missing and was replaced", has_cause=False),
    "checkpoint_fallback": Kind(
        "bad", "Resumed at step {step} of the newest valid checkpoint; step {done} was done", has_cause=False
    ),
    "woke": Kind("plain", "The machine or the process was suspended for {slept_s} s", has_cause=False),
    "clock_moved": Kind("bad", "This machine's clock was moved by {jump_s} s", has_cause=False),
    "understated": Kind("bad", "Implausible log-probs from {who}", "sender"),
}


def sentence(entry: TimelineEntry, name_of: Callable[[str], str]) -> str:
    """Return the entry as a sentence, not yet escaped. `name_of` returns a peer's name for its id."""
    kind, last, count = KINDS[entry.kind], entry.last, entry.count
    subjects = [name_of(subject) for subject in list(entry.counts)[:MAX_SUBJECTS]]
    who = ", ".join(subjects) + (f" and {len(entry.counts) - MAX_SUBJECTS} more" * (len(entry.counts) > MAX_SUBJECTS))
    begin, end = _shown(entry.first.get("step", "?")), _shown(last.get("step", "?"))
    values = defaultdict(lambda: "?", {name: _shown(value) for name, value in entry.first.items()})
    values |= {
        "who": who,
        "count": f"{count:,}",
        "steps": f"step {begin}" if begin == end else f"steps {begin} to {end}",
        "tally": ", ".join(f"{clean(reason, limit=24)} {n:,}" for reason, n in entry.counts.most_common(5)),
    }
    text = kind.text.format_map(values)
    if not kind.has_cause:
        return text
    times = f", {count:,} times" if count > 1 and not who else ""
    cause = next((last[name] for name in CAUSES if last.get(name)), "")
    return f"{text}{times}: {_shown(cause)}" if cause else f"{text}{times}"


def _shown(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else clean(without_paths(value))
