"""Groups: a row of the list, and one in full with prompt, completions, log-probs, rewards, validation and use."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from ftis_node.dashboard.view.events import event_line
from ftis_node.dashboard.view.spans import (
    Line,
    Span,
    Tone,
    clock,
    labeled,
    line,
    number,
    short_id,
)
from ftis_node.telemetry.terminal_text import clipped, date_time, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftis_node.dashboard.buffer_reader import GroupDetail
    from ftis_node.replay.group_history import CompletionDetails
    from ftis_node.replay.reader import GroupSummary

GROUP_COLUMNS = ("time", "id", "from", "problem", "reward", "state", "tokens")
ID_WIDTH, NAME_WIDTH, TASK_WIDTH, STATE_WIDTH = 8, 9, 20, 13
MAX_SHOWN_TOKENS = 400
RARE = -2.3  # nats: less likely than one in ten
FATES = {
    "stale": "released unused: its weights were too old",
    "evicted": "released unused: the buffer was full",
    "discarded": "released unused: the run's selection preferred others",
    "poisoned": "released unused: the learner failed in several steps that had it",
    "refused": "in a step that the learner rejected",
    "audit": "released unused: its log-probs do not match the weights that it names",
    "delivered": "sent to a peer; this node does not train",
}


def group_row(group: GroupSummary, names: Mapping[str, str]) -> tuple[Span, ...]:
    """Return one cell for each of GROUP_COLUMNS. `names` are the peers' names by their ids."""
    sender = clipped(names.get(group.sender, ""), NAME_WIDTH) or short_id(group.sender)
    fate = (group.reason or group.state) + ("" if group.step is None else f" {group.step}")
    return (
        Span(clock(group.admitted_at)[:-3], Tone.FAINT),
        Span(group.id[:ID_WIDTH]),
        Span("own") if group.own else Span(sender, Tone.STRONG),
        Span(clipped(f"{group.task}/{group.prompt_index}", TASK_WIDTH)),
        Span(f"{group.reward_mean:.2f}", Tone.GOOD if group.reward_mean > 0 else Tone.PLAIN),
        Span(clipped(fate, STATE_WIDTH)),
        Span(str(group.num_tokens)),
    )


def group_lines(group: GroupDetail, *, with_tokens: bool = False) -> list[Line]:
    """Return one group in full; `with_tokens` adds the log-prob of each token."""
    summary = group.summary
    whose = "this node" if summary.own else printable(summary.sender)
    weights = f", by the weights of {printable(group.weights_of)}" if group.weights_of else ""
    lines = [
        labeled("group", Span(summary.id, Tone.STRONG)),
        labeled("made by", whose),
        labeled(
            "with",
            f"{printable(summary.model)}, version {summary.policy_version}, temperature {group.temperature:g}{weights}",
        ),
        labeled("when", f"{date_time(summary.created_at)}, its group number {summary.number}"),
        labeled("problem", f"{printable(summary.task)}/{summary.prompt_index}"),
        verdict_line(summary),
        use_line(summary),
        line(),
        line(Span(f"prompt, {len(group.prompt_ids)} tokens", Tone.FAINT)),
        *_block(group.prompt, group.prompt_ids),
    ]
    for place, (completion, pieces) in enumerate(zip(group.completions, group.pieces, strict=True), start=1):
        lines += [line(), _head(place, completion, summary.policy_version)]
        lines += _block(completion.text, completion.token_ids)
        if with_tokens and completion.logprobs:
            lines.append(_token_line(pieces, completion.logprobs))
    return [*lines, line(), *history_lines(group.history)]


def verdict_line(summary: GroupSummary) -> Line:
    """Return the result of validation. Rejected groups are only in the event log."""
    rewards = ", ".join(f"{reward:g}" for reward in summary.rewards)
    note = "" if len(set(summary.rewards)) > 1 else " (all equal: no learning signal)"
    return labeled(
        "validation", Span("accepted", Tone.GOOD), f" {date_time(summary.admitted_at)}, rewards {rewards}{note}"
    )


def use_line(summary: GroupSummary) -> Line:
    """Return the step that used the group, or the reason why none did."""
    if summary.state == "ready":
        return labeled("used", "not yet: it is ready for a step")
    if summary.state == "taken":
        return labeled("used", Span(f"in step {summary.step}, which runs now", Tone.STRONG))
    if summary.reason == "trained":
        return labeled("used", Span(f"in step {summary.step}", Tone.GOOD))
    reason = str(summary.reason)
    return labeled("used", Span(FATES.get(reason, f"no: {printable(reason)}"), Tone.WARN))


def _head(place: int, completion: CompletionDetails, version: int) -> Line:
    """Return the values of a completion, with its policy versions if they differ from the group's."""
    tone = Tone.GOOD if completion.reward > 0 else Tone.PLAIN
    least = "" if completion.lowest_logprob is None else f", least {completion.lowest_logprob:.2f}"
    first, last = completion.versions or (version, version)
    versions = "" if first == last == version else f", version {first}" + ("" if first == last else f" to {last}")
    return line(
        Span(f"completion {place}  ", Tone.FAINT),
        Span(f"reward {completion.reward:g}", tone),
        f"  {completion.num_tokens} tokens, {completion.finish_reason}",
        f", log-prob mean {number(completion.mean_logprob, digits=3)}{least}",
        versions,
    )


def _block(text: str | None, token_ids: Sequence[int]) -> list[Line]:
    if text is None:
        shown = " ".join(str(token) for token in token_ids[:MAX_SHOWN_TOKENS])
        return [line("  ", Span("ids ", Tone.FAINT), shown)]
    return [line("  ", row) for row in printable(text.rstrip("\n"), keep_newlines=True).split("\n")]


def _token_line(pieces: Sequence[str], logprobs: Sequence[float]) -> Line:
    """Return every token with its log-prob; improbable tokens are highlighted."""
    spans: list[Span | str] = ["  "]
    for piece, logprob in islice(zip(pieces, logprobs, strict=True), MAX_SHOWN_TOKENS):
        spans += [printable(piece), Span(f" {logprob:.2f}  ", Tone.WARN if logprob < RARE else Tone.FAINT)]
    return line(*spans)


def history_lines(found: tuple[Mapping[str, Any], ...]) -> list[Line]:
    if not found:
        return [line(Span("the event log no longer has its history", Tone.FAINT))]
    events = [{name: value for name, value in event.items() if name != "group"} for event in found]
    return [line(Span("its history in this node", Tone.FAINT)), *(line("  ", *event_line(event)) for event in events)]
