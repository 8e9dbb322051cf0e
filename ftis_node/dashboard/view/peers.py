"""Peers: a row of the table, and one peer with all its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftis_node.dashboard.view.spans import (
    Line,
    Span,
    Tone,
    ago,
    clipped,
    count,
    labeled,
    line,
    moment,
    number,
    sanitized,
    short_id,
)
from ftis_node.swarm.peer_rows import teaches, teaching_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PEER_COLUMNS = ("peer", "model", "trust", "accepted", "teaches", "rejected", "confirmed", "seen")
NAME_WIDTH, MODEL_WIDTH, REASON_WIDTH = 9, 16, 60
STANDING_TONES = {"banned": Tone.BAD, "probation": Tone.WARN, "trusted": Tone.GOOD, "good": Tone.GOOD}
STANDING_WORDS = {
    "good": "no restrictions",
    "probation": "rejections or failures lowered its score; all its groups are audited",
    "banned": "this node neither fetches from it nor serves it",
    "trusted": "set by the operator: the node never bans it",
}


def sorted_peers(peers: Iterable[Mapping[str, Any]], by: str = "accepted") -> list[Mapping[str, Any]]:
    """Sort by a column of PEER_COLUMNS: numbers descending, words alphabetically, trust from the lowest.

    Among equals, peers with more accepted groups come first, and those with more rejected groups come last.
    """
    key = ORDERS[by]
    return sorted(peers, key=lambda row: (key(row), -row.get("groups_accepted", 0), _refused(row), row["peer_id"]))


def is_found(row: Mapping[str, Any], search_text: str) -> bool:
    """Return whether a peer's id, name, model, role or trust contains the text, ignoring case."""
    texts = (str(row.get(key) or "") for key in ("peer_id", "name", "model", "role", "standing"))
    return any(search_text.casefold() in text.casefold() for text in texts)


def peer_row(row: Mapping[str, Any], *, now: float) -> tuple[Span, ...]:
    """Return one cell for each of PEER_COLUMNS."""
    standing = str(row.get("standing", "good"))
    refused = _refused(row)
    parameters = f" {count(row['parameters'])}" if row.get("parameters") else ""
    model = sanitized(row.get("model") or "-").rsplit("/", 1)[-1]
    return (
        Span(clipped(sanitized(row.get("name") or "") or short_id(row["peer_id"]), NAME_WIDTH), Tone.STRONG),
        Span(clipped(model, MODEL_WIDTH - len(parameters)) + parameters),
        Span(sanitized(standing), STANDING_TONES.get(standing, Tone.PLAIN)),
        Span(count(row.get("groups_accepted", 0))),
        Span(teaches(row)),
        Span(count(refused), Tone.WARN if refused else Tone.FAINT),
        Span(count(row.get("groups_confirmed", 0))),
        Span(ago(row.get("last_seen", 0.0), now)),
    )


def peer_lines(row: Mapping[str, Any], *, now: float) -> list[Line]:
    """Return all values of one peer."""
    standing = str(row.get("standing", "good"))
    version = row.get("policy_version")
    lines = [
        labeled("peer id", sanitized(row["peer_id"])),
        labeled("name", Span(sanitized(row.get("name") or "-"), Tone.STRONG)),
        labeled("model", f"{sanitized(row.get('model') or '-')}, {count(row.get('parameters') or 0)} parameters"),
        labeled("role", f"{sanitized(row.get('role') or '-')}, version {'-' if version is None else version}"),
        *([labeled("domain", sanitized(row["domain"]))] if row.get("domain") else []),
        labeled("last seen", f"{ago(row.get('last_seen', 0.0), now)} ago" if row.get("last_seen") else "never"),
        line(),
        labeled(
            "trust",
            Span(sanitized(standing), STANDING_TONES.get(standing, Tone.PLAIN)),
            f", score {number(row.get('score'), digits=3)}: {STANDING_WORDS.get(standing, '')}",
        ),
    ]
    if row.get("banned_until"):
        why = clipped(sanitized(row.get("ban_reason") or ""), REASON_WIDTH)
        lines.append(labeled("banned", f"until {moment(row['banned_until'])}: {why}"))
    lines += [
        line(),
        labeled("its groups", f"{row.get('groups_accepted', 0)} accepted, {_refused(row)} rejected"),
        *_tally("rejected", row.get("groups_refused") or {}),
        *_tally("against it", row.get("reasons") or {}),
        *_teaching(row),
        labeled("our groups", f"{row.get('groups_confirmed', 0)} confirmed by it"),
        labeled("pulls", f"{row.get('failed_pulls', 0)} failed"),
    ]
    return lines


ORDERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "accepted": lambda row: -row.get("groups_accepted", 0),
    "teaches": lambda row: -((row.get("teaching") or {}).get("teaches") or 0.0),
    "rejected": lambda row: -_refused(row),
    "trust": lambda row: (
        list(STANDING_TONES).index(standing)
        if (standing := str(row.get("standing", "good"))) in STANDING_TONES
        else len(STANDING_TONES)
    ),
    "confirmed": lambda row: -row.get("groups_confirmed", 0),
    "seen": lambda row: -row.get("last_seen", 0.0),
    "peer": lambda row: str(row.get("name") or row["peer_id"]).casefold(),
    "model": lambda row: str(row.get("model") or "").casefold(),
}


def ban_words(row: Mapping[str, Any]) -> str:
    """Return the commands that change the peer's reputation; the dashboard itself changes nothing."""
    peer_id = sanitized(row["peer_id"])[-8:]
    verb = "unban" if row.get("standing") == "banned" else "ban"
    return f"to change that: ftis-node peers {verb} {peer_id}   (or: trust {peer_id})"


def _teaching(row: Mapping[str, Any]) -> list[Line]:
    """Return the effect of the peer's groups on training; nothing before a step used one."""
    words = teaching_words(row) if row.get("teaching") else []
    return [labeled("" if place else "teaches", text) for place, text in enumerate(words)]


def _tally(label: str, reasons: Mapping[str, int]) -> list[Line]:
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return [
        labeled(label if place == 0 else "", f"{many:>6}  {clipped(sanitized(reason), REASON_WIDTH)}")
        for place, (reason, many) in enumerate(ordered)
    ]


def _refused(row: Mapping[str, Any]) -> int:
    return sum((row.get("groups_refused") or {}).values())
