"""History of one group, and one peer with all its values, as text and as JSON.

Peers' text is quoted, so that it cannot control the terminal.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from ftis_node.errors import UsageError
from ftis_node.swarm.peer_rows import find_peer, teaching_words
from ftis_node.swarm.reasons import sentence
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.terminal_text import cells, clipped, cut, printable, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.config.home import Home
    from ftis_node.replay.group_history import CompletionDetails, GroupHistory, PromptDetails

WIDTH = 80
INDENT = 12
MARGIN = "    | "
SHOWN_FIELDS = ("step", "reason", "attempt", "peer", "kl", "detail")
NUM_NEWEST = 5


def group_document(story: GroupHistory) -> dict[str, Any]:
    """Return the history as `replay show --json` prints it."""
    row = {"id": story.id} if story.summary is None else dataclasses.asdict(story.summary)
    rest = dataclasses.asdict(dataclasses.replace(story, completions=()))
    del rest["id"], rest["summary"]
    fate = rest.pop("reason")
    completions = [_completion_row(completion) for completion in story.completions]
    return {**row, **rest, "refusal": fate, "completions": completions}


def group_screen(story: GroupHistory) -> list[str]:
    lines = []
    for name, text in (*_head(story), *_fate(story)):
        names = [name] + [""] * len(text)
        lines += [f"{head:{INDENT}}{part}" for head, part in zip(names, wrapped(text, WIDTH - INDENT), strict=False)]
    if story.prompt is not None:
        lines += ["", *_prompt(story.prompt)]
    if story.completions:
        lines += ["", *_completions(story)]
    if story.events:
        lines += ["", "events", *(_event(event) for event in story.events)]
    return lines


def _head(story: GroupHistory) -> Iterator[tuple[str, str]]:
    yield "group", story.id
    if summary := story.summary:
        yield "made by", f"this node ({summary.sender})" if summary.own else summary.sender
        weights = f", with the weights of {story.weights_of}" if story.weights_of else ""
        yield (
            "",
            f"its group {summary.number}, by {summary.model or 'an unnamed model'}, version {summary.policy_version}"
            f"{weights}, at {_clock(summary.created_at)}",
        )


def _fate(story: GroupHistory) -> Iterator[tuple[str, str]]:
    if story.verdict == "refused":
        reason = str(story.reason)
        yield "validation", f"rejected ({reason}): {sentence(reason)}. {story.detail}"
    else:
        at = f" at {_clock(story.summary.admitted_at)}" if story.summary else ""
        yield "validation", f"accepted{at}: it passed all rules"
    yield "used", story.used
    if story.texts_missing:
        yield "note", story.texts_missing


def _prompt(prompt: PromptDetails) -> Iterator[str]:
    yield f"prompt      {printable(f'{prompt.task}/{prompt.split}/{prompt.index}')}"
    if prompt.text is None:
        yield from wrapped(f"    its text is not available: {prompt.missing}", WIDTH, indent=4)
        return
    yield from _quoted(prompt.text)
    if prompt.answer:
        yield f"    answer: {clipped(prompt.answer, WIDTH - INDENT)}"


def _completions(story: GroupHistory) -> Iterator[str]:
    rewards = [completion.reward for completion in story.completions]
    yield f"completions {len(rewards)}, mean reward {sum(rewards) / len(rewards):.3f}"
    for completion in story.completions:
        lowest = "" if completion.lowest_logprob is None else f", lowest {completion.lowest_logprob:.4f}"
        claimed = "" if completion.claimed_reward == completion.reward else f" (claimed {completion.claimed_reward:g})"
        head = (
            f"  reward {completion.reward:g}{claimed}, {completion.num_tokens} tokens, {completion.finish_reason}, "
            f"mean log-prob {completion.mean_logprob:.4f}{lowest}"
        )
        yield from _with_text(head, completion)


def _with_text(head: str, completion: CompletionDetails) -> Iterator[str]:
    """Yield the head line with the text behind it if it fits, else the text below. The text is never shortened."""
    text = completion.text
    inline = str(completion.token_ids) if text is None else repr(text)
    if cells(f"{head}: {inline}") <= WIDTH:
        yield f"{head}: {inline}"
    else:
        yield f"{head}:"
        yield from _quoted(inline if text is None else text)


def _quoted(text: str) -> Iterator[str]:
    """Yield each line after a margin, without characters that control a terminal."""
    return (MARGIN + piece for line in text.splitlines() or [""] for piece in cut(line, WIDTH - len(MARGIN)))


def _event(event: dict[str, Any]) -> str:
    fields = [f"{name} {event[name]}" for name in SHOWN_FIELDS if event.get(name) is not None]
    return clipped(f"    {_clock(event['time'])}  {event['event']}{'  ' + ', '.join(fields) if fields else ''}", WIDTH)


def _completion_row(completion: CompletionDetails) -> dict[str, Any]:
    row = dataclasses.asdict(completion)
    if not completion.token_ids:
        del row["token_ids"], row["logprobs"], row["lowest_logprob"]
        row["sender_tokens"] = row.pop("num_tokens")
    return row


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def peer_document(home: Home, peer: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the peer's row of `rows` with its groups in the buffer. Raises UsageError for an unknown peer."""
    from ftis_node.replay.reader import ReplayReader

    peer_id = find_peer(peer, rows)
    row = next((row for row in rows if row["peer_id"] == peer_id), None)
    if row is None:
        raise UsageError(f"this node does not know {peer_id}: `ftis-node peers` lists its peers")
    reader = ReplayReader(home.replay)
    try:
        groups = reader.groups_of(peer_id, limit=NUM_NEWEST)
    finally:
        reader.close()
    return {
        **row,
        "groups": dataclasses.asdict(groups),
        "held_against": _explained(row.get("reasons", {})),
        "refused": _explained(row["groups_refused"]),
    }


def peer_screen(document: dict[str, Any], *, now: float) -> list[str]:
    """Return the lines. `now` is Unix time in seconds."""
    lines = []
    for name, text in _facts(document, now):
        names = [name] + [""] * len(text)
        lines += [f"{head:{INDENT}}{part}" for head, part in zip(names, wrapped(text, WIDTH - INDENT), strict=False)]
    return lines


def _facts(document: dict[str, Any], now: float) -> Iterator[tuple[str, str]]:
    parameters = f" ({document['parameters']:,} parameters)" if document["parameters"] else ""
    version = "" if document["policy_version"] is None else f", version {document['policy_version']}"
    seen = duration(now - document["last_seen"]) + " ago" if document["last_seen"] else "not since the node's start"
    yield "peer", document["peer_id"]
    yield "name", document["name"] or "none given"
    yield "model", f"{document['model'] or 'model unknown'}{parameters}, {document['role'] or 'role unknown'}{version}"
    if domain := document.get("domain"):
        yield "domain", domain
    yield "last seen", seen
    if words := document.get("wire_words"):
        yield "version", words
    yield "trust", _trust(document, now)
    yield (
        "groups",
        f"{document['groups_accepted']} groups accepted since the start; it confirmed "
        f"{document['groups_confirmed']} of ours, {document['failed_pulls']} fetches from it failed",
    )
    yield "", _kept(document["groups"])
    for number, words in enumerate(teaching_words(document)):
        yield "" if number else "teaches", words
    yield from _reasons("rejected", "none of its groups since the start", document["refused"])
    yield from _reasons("on record", "no faults", document["held_against"])
    for group in document["groups"]["newest"]:
        mean = sum(group["rewards"]) / len(group["rewards"])
        fate = group["reason"] or group["state"]
        yield "newest", f"{group['id'][:12]}  {group['task']}/{group['prompt_index']}  {fate}  reward {mean:.2f}"


def _trust(document: dict[str, Any], now: float) -> str:
    score = f"score {document.get('score', 0):g} (0 for a new peer, at most 10, banned at -10)"
    text = f"{document.get('standing', 'good')}, {score}"
    if document.get("banned_until"):
        reason = document["ban_reason"]
        left = duration(document["banned_until"] - now)
        text += f"; banned for {left} more for {reason!r}: {sentence(reason)}; `peers unban` ends it"
    return text + ("; trusted by you" if document.get("trusted") else "")


def _kept(groups: dict[str, Any]) -> str:
    done = ", ".join(f"{count} {reason}" for reason, count in sorted(groups["released"].items()))
    return (
        f"in the buffer: {groups['ready']} ready, {groups['taken']} in a step"
        f"{', ' + done if done else ''}; {groups['tokens']:,} tokens"
    )


def _reasons(name: str, nothing: str, explained: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if not explained:
        yield name, nothing
    for number, reason in enumerate(explained):
        yield "" if number else name, f"{reason['count']} x {reason['reason']}: {reason['sentence']}"


def _explained(counts: dict[str, int]) -> list[dict[str, Any]]:
    """Return each reason with its count and its explanation, the most frequent first."""
    return [
        {"reason": reason, "count": count, "sentence": sentence(reason)}
        for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
