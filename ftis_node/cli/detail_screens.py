"""History of one group, and one peer with all its values, as text and as JSON.

Peers' text is quoted, so that it cannot control the terminal.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ftis_node.dashboard.view.peers import explained, peer_lines
from ftis_node.dashboard.view.spans import text_of
from ftis_node.errors import UsageError
from ftis_node.swarm.peer_rows import find_peer
from ftis_node.swarm.reasons import sentence
from ftis_node.telemetry.terminal_text import LABEL, cells, clipped, cut, date_time, labeled, printable, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.config.home import Home
    from ftis_node.replay.group_history import CompletionDetails, GroupHistory, PromptDetails

WIDTH = 80
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
    lines = labeled((*_head(story), *_fate(story)), WIDTH)
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
            f"{weights}, at {date_time(summary.created_at)}",
        )


def _fate(story: GroupHistory) -> Iterator[tuple[str, str]]:
    if story.verdict == "refused":
        reason = str(story.reason)
        yield "validation", f"rejected ({reason}): {sentence(reason)}. {story.detail}"
    else:
        at = f" at {date_time(story.summary.admitted_at)}" if story.summary else ""
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
        yield f"    answer: {clipped(prompt.answer, WIDTH - LABEL)}"


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
    return (MARGIN + piece for line in text.splitlines() or [""] for piece in cut(line, WIDTH - len(MARGIN)))


def _event(event: dict[str, Any]) -> str:
    fields = [f"{name} {event[name]}" for name in SHOWN_FIELDS if event.get(name) is not None]
    return clipped(
        f"    {date_time(event['time'])}  {event['event']}{'  ' + ', '.join(fields) if fields else ''}", WIDTH
    )


def _completion_row(completion: CompletionDetails) -> dict[str, Any]:
    row = dataclasses.asdict(completion)
    del row["versions"]
    if not completion.token_ids:
        del row["token_ids"], row["logprobs"], row["lowest_logprob"]
        row["sender_tokens"] = row.pop("num_tokens")
    return row


def peer_document(home: Home, peer: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the peer's row of `rows` with its groups in the buffer. Raises UsageError for an unknown peer."""
    from ftis_node.replay.reader import ReplayReader

    peer_id = find_peer(peer, rows)
    row = next((row for row in rows if row["peer_id"] == peer_id), None)
    if row is None:
        raise UsageError(f"this node does not know {peer_id}: `ftis-node peers` lists its peers")
    with closing(ReplayReader(home.replay)) as reader:
        groups = reader.groups_of(peer_id, limit=NUM_NEWEST)
    return {
        **row,
        "groups": dataclasses.asdict(groups),
        "held_against": explained(row.get("reasons", {})),
        "refused": explained(row["groups_refused"]),
    }


def peer_screen(document: dict[str, Any], *, now: float) -> list[str]:
    """Return the lines: those of the dashboard, and the peer's groups in the buffer. `now` is Unix time in seconds."""
    lines = peer_lines(document, now=now)
    facts = [(shown[0].text.rstrip(), text_of(shown[1:])) for shown in lines]
    groups = document["groups"]
    done = "".join(f", {count} {reason}" for reason, count in sorted(groups["released"].items()))
    facts.append(("buffer", f"{groups['ready']} ready, {groups['taken']} in a step{done}; {groups['tokens']:,} tokens"))
    for group in groups["newest"]:
        mean = sum(group["rewards"]) / len(group["rewards"])
        fate = group["reason"] or group["state"]
        text = f"{group['id'][:12]}  {group['task']}/{group['prompt_index']}  {fate}  reward {mean:.2f}"
        facts.append(("newest", text))
    return labeled(facts, WIDTH)
