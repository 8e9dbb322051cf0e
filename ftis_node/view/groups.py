"""Groups: a row of the list, and one in full with prompt, completions, log-probs, rewards, validation and use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, repeat, takewhile, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ftis_node.swarm.sequence import counter_of
from ftis_node.telemetry.health_summary import plural
from ftis_node.telemetry.terminal_text import clipped, date_time
from ftis_node.view.events import event_line
from ftis_node.view.formats import clock, number, short_id
from ftis_node.view.spans import MARGIN, Line, Span, Tone, labeled, line

if TYPE_CHECKING:
    from ftis_node.replay.group_history import CompletionDetails, GroupHistory
    from ftis_node.replay.reader import GroupSummary

GROUP_COLUMNS = ("time", "id", "from", "problem", "reward", "state", "tokens")
ID_WIDTH, NAME_WIDTH, TASK_WIDTH, STATE_WIDTH = 8, 9, 20, 13
MAX_SHOWN_TOKENS = 400
MAX_PLACES = 4  # of equal completions
RARE = -2.3  # nats: less likely than one in ten
USE_TONES = {"ready": Tone.PLAIN, "taken": Tone.STRONG, "trained": Tone.GOOD}


def group_row(group: GroupSummary, names: Mapping[str, str]) -> Line:
    """Return one cell for each of GROUP_COLUMNS. `names` are the peers' names by their ids."""
    sender = clipped(names.get(group.sender, ""), NAME_WIDTH) or short_id(group.sender)
    state = (group.reason or group.state) + ("" if group.step is None else f" {group.step}")
    return line(
        Span(clock(group.admitted_at)[:-3], Tone.FAINT),
        Span(group.id[:ID_WIDTH]),
        Span("own") if group.own else Span(sender, Tone.STRONG),
        Span(clipped(f"{group.task}/{group.prompt_index}", TASK_WIDTH)),
        Span(f"{group.reward_mean:.2f}", Tone.GOOD if group.reward_mean > 0 else Tone.PLAIN),
        Span(clipped(state, STATE_WIDTH)),
        Span(str(group.num_tokens)),
    )


def group_lines(history: GroupHistory, *, with_tokens: bool = False) -> list[Line]:
    """Return one group in full; `with_tokens` adds the log-prob of each token.

    The first span of a line is a label, or it ends as MARGIN does before a text of the model or of its environment.
    Equal completions are one.
    """
    lines = [labeled("group", Span(history.id, Tone.STRONG)), *_origin_lines(history), validation_line(history)]
    state = history.summary and (history.summary.reason or history.summary.state)
    lines.append(labeled("used", Span(history.used, USE_TONES.get(state or "", Tone.WARN))))
    if history.texts_missing:
        lines.append(labeled("note", history.texts_missing))
    if prompt := history.prompt:
        lines += [line(), labeled("prompt", f"{prompt.task}/{prompt.split}/{prompt.index}")]
        lines += _block(prompt.text, f"its text is not available: {prompt.missing}")
        if prompt.answer is not None:
            lines.append(labeled("answer", prompt.answer))
    mean = fmean(one.reward for one in history.completions) if history.completions else 0.0
    shown: list[CompletionDetails] = []
    for places, completion in distinct(history.completions):
        ids = " ".join(str(token) for token in completion.token_ids[:MAX_SHOWN_TOKENS])
        lines += [line(), _head(places, completion, history.summary, mean)]
        lines += _chat(completion, shown) if completion.turns else _block(completion.text, f"ids {ids}")
        shown.append(completion)
        if with_tokens and completion.logprobs:
            lines.append(_token_line(completion.pieces, completion.logprobs))
    return [*lines, line(), *_event_lines(history.events)]


def distinct(completions: Sequence[CompletionDetails]) -> Iterable[tuple[list[int], CompletionDetails]]:
    """Return each different completion once, after the numbers of those that equal it."""
    found: dict[Any, tuple[list[int], CompletionDetails]] = {}
    for place, one in enumerate(completions, start=1):
        key = (one.text, *one.token_ids, *one.turns, one.reward, one.claimed_reward, one.finish_reason)
        found.setdefault(key, ([], one))[0].append(place)
    return found.values()


def _chat(completion: CompletionDetails, earlier: Sequence[CompletionDetails]) -> list[Line]:
    """Return the turns of an episode and the observations between them. Turns of an earlier one are only counted."""
    pairs = list(zip_longest(completion.turns, completion.observations))
    same = max((_num_equal(pairs, list(zip_longest(one.turns, one.observations))) for one in earlier), default=0)
    lines = [line("  ", Span(f"{plural(same, 'turn')} as above", Tone.FAINT))] if same else []
    for turn, (text, observation) in enumerate(pairs[same:], start=same + 1):
        lines += _said(f"turn {turn}", text, Tone.PLAIN)
        if observation is not None:
            lines += _said("observed", observation, Tone.STRONG)
    return lines


def _num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _said(who: str, text: str, tone: Tone) -> list[Line]:
    labels = chain((f"  {who:8}",), repeat(" " * 10))
    rows = text.rstrip("\n").split("\n")
    return [
        line(Span(label + MARGIN[-3:], Tone.FAINT), Span(row, tone)) for label, row in zip(labels, rows, strict=False)
    ]


def _origin_lines(history: GroupHistory) -> list[Line]:
    if (summary := history.summary) is None:
        return []
    weights = f", by the weights of {history.weights_of}" if history.weights_of else ""
    model = summary.model or "an unnamed model"
    return [
        labeled("made by", f"this node ({summary.sender})" if summary.own else summary.sender),
        labeled("with", f"{model}, version {summary.policy_version}, temperature {history.temperature:g}{weights}"),
        labeled("when", f"{date_time(summary.created_at)}, group {counter_of(summary.number)} of its start"),
    ]


def validation_line(history: GroupHistory) -> Line:
    """Return the result of validation. Refused groups are only in the event log."""
    from ftis_node.swarm.reasons import sentence

    if history.verdict == "refused":
        reason = str(history.reason)
        why = f" ({reason}): {sentence(reason)}. {history.detail}"
        return labeled("validation", Span("refused", Tone.BAD), why)
    if (summary := history.summary) is None:
        return labeled("validation", Span("accepted", Tone.GOOD))
    rewards = ", ".join(f"{reward:g}" for reward in summary.rewards)
    note = "" if len(set(summary.rewards)) > 1 else " (all equal: no learning signal)"
    return labeled(
        "validation", Span("accepted", Tone.GOOD), f" {date_time(summary.admitted_at)}, rewards {rewards}{note}"
    )


def _head(
    places: Sequence[int], completion: CompletionDetails, summary: GroupSummary | None, group_mean: float
) -> Line:
    tone = Tone.GOOD if completion.reward > 0 else Tone.PLAIN
    more = f" and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
    which = f"completion{'s' * (len(places) > 1)} {', '.join(map(str, places[:MAX_PLACES]))}{more}"
    advantage = completion.reward - group_mean
    claimed = "" if completion.claimed_reward == completion.reward else f" (claimed {completion.claimed_reward:g})"
    least = "" if completion.lowest_logprob is None else f", least {completion.lowest_logprob:.2f}"
    first, last = completion.versions or (None, None)
    is_usual = first is None or (summary is not None and first == last == summary.policy_version)
    versions = "" if is_usual else f", version {first}" + ("" if first == last else f" to {last}")
    return line(
        Span(f"{which}  ", Tone.FAINT),
        Span(f"reward {completion.reward:g}{claimed}", tone),
        Span(f", advantage {advantage:+.2f}", Tone.GOOD if advantage > 0 else Tone.PLAIN) if advantage else "",
        f"  {plural(len(completion.turns), 'turn')}, " if completion.turns else "  ",
        f"{completion.num_tokens} tokens, {completion.finish_reason}",
        f", log-prob mean {number(completion.mean_logprob)}{least}",
        versions,
    )


def _block(text: str | None, instead: str) -> list[Line]:
    if text is None:
        return [line(Span(MARGIN, Tone.FAINT), Span(instead, Tone.FAINT))]
    rows = text.rstrip("\n").split("\n")
    return [line(Span(MARGIN, Tone.FAINT), row) for row in rows]


def _token_line(pieces: Sequence[str], logprobs: Sequence[float]) -> Line:
    spans: list[Span | str] = [Span(MARGIN, Tone.FAINT)]
    for piece, logprob in islice(zip(pieces, logprobs, strict=True), MAX_SHOWN_TOKENS):
        spans += [piece, Span(f" {logprob:.2f}  ", Tone.WARN if logprob < RARE else Tone.FAINT)]
    return line(*spans)


def _event_lines(found: Sequence[Mapping[str, Any]]) -> list[Line]:
    if not found:
        return [line(Span("the event log no longer has its history", Tone.FAINT))]
    events = [{name: value for name, value in event.items() if name != "group"} for event in found]
    return [line(Span("its history in this node", Tone.FAINT)), *(line("  ", *event_line(event)) for event in events)]
