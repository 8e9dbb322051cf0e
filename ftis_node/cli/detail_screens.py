"""History of one group, and one peer with all its values, as text and as JSON.

Peers' text is quoted, so that it cannot control the terminal.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ftis_node.errors import UsageError
from ftis_node.swarm.peer_rows import find_peer
from ftis_node.view.peers import peer_lines, reason_rows
from ftis_node.view.spans import labeled, text_lines

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.replay.group_history import CompletionDetails, GroupHistory

WIDTH = 80
NUM_NEWEST = 5


def group_document(history: GroupHistory) -> dict[str, Any]:
    """Return the history as `replay show --json` prints it."""
    row = {"id": history.id} if history.summary is None else dataclasses.asdict(history.summary)
    rest = dataclasses.asdict(dataclasses.replace(history, completions=()))
    del rest["id"], rest["summary"]
    reason = rest.pop("reason")
    completions = [_completion_row(completion) for completion in history.completions]
    return {**row, **rest, "refusal": reason, "completions": completions}


def _completion_row(completion: CompletionDetails) -> dict[str, Any]:
    row = dataclasses.asdict(completion)
    del row["versions"], row["pieces"]
    if not completion.turns:
        del row["turns"], row["observations"]
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
        "held_against": reason_rows(row.get("reasons", {})),
        "refused": reason_rows(row["groups_refused"]),
    }


def peer_screen(document: dict[str, Any], *, now: float) -> list[str]:
    """Return the lines: those of the dashboard, and the peer's groups in the buffer. `now` is Unix time in seconds."""
    groups = document["groups"]
    done = "".join(f", {count} {reason}" for reason, count in sorted(groups["released"].items()))
    stored = f"{groups['ready']} ready, {groups['taken']} in a step{done}; {groups['tokens']:,} tokens"
    lines = [*peer_lines(document, now=now), labeled("buffer", stored)]
    for group in groups["newest"]:
        mean = sum(group["rewards"]) / len(group["rewards"])
        state = group["reason"] or group["state"]
        text = f"{group['id'][:12]}  {group['task']}/{group['prompt_index']}  {state}  reward {mean:.2f}"
        lines.append(labeled("newest", text))
    return text_lines(lines, WIDTH)
