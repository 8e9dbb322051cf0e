"""One peer with all its values, as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ftis_node.errors import UsageError
from ftis_node.swarm.peer_rows import find_peer, teaching_words
from ftis_node.swarm.reasons import sentence
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.terminal_text import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.config.home import Home

WIDTH = 80
INDENT = 12
NUM_NEWEST = 5


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


def screen(document: dict[str, Any], *, now: float) -> list[str]:
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
