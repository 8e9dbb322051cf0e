"""Peers: a row of the table, and one peer with all its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ftis_node.swarm.peer_rows import shown_names
from ftis_node.telemetry.status import NodeStatus
from ftis_node.telemetry.terminal_text import clipped, date_time, printable
from ftis_node.view.formats import ago, count, number, percent, short_id
from ftis_node.view.spans import Line, Span, Tone, labeled, line

PEER_COLUMNS = ("peer", "model", "trust", "accepted", "effective", "refused", "confirmed", "seen")
NAME_WIDTH, MODEL_WIDTH, REASON_WIDTH = 9, 16, 60
TRUST_TONES = {"banned": Tone.BAD, "probation": Tone.WARN, "trusted": Tone.GOOD, "good": Tone.GOOD}
TRUST_ORDER = {level: place for place, level in enumerate(TRUST_TONES)}
TRUST_WORDS = {
    "good": "no restrictions",
    "probation": "refusals or failures lowered its score; all its groups are audited",
    "banned": "this node neither fetches from it nor serves it",
    "trusted": "set by the operator: the node never bans it",
}


def sorted_peers(peers: Iterable[Mapping[str, Any]], by: str = "accepted") -> list[Mapping[str, Any]]:
    """Sort by a column of PEER_COLUMNS: numbers descending, words alphabetically, trust from the lowest.

    Among equals, peers with more accepted groups come first, and those with more refused groups come last.
    """
    key = ORDERS[by]
    return sorted(peers, key=lambda row: (key(row), -row.get("groups_accepted", 0), _refused(row), row["peer_id"]))


def is_found(row: Mapping[str, Any], search_text: str) -> bool:
    """Return whether a peer's id, name, model, role or trust contains the text, ignoring case."""
    texts = (str(row.get(key) or "") for key in ("peer_id", "name", "model", "role", "trust_level"))
    return any(search_text.casefold() in text.casefold() for text in texts)


def peer_names(rows: Iterable[Mapping[str, Any]], node: NodeStatus) -> dict[str, str]:
    """Return the names to show for the peers and for this node, by peer id."""
    names = {row["peer_id"]: str(row.get("name") or "") for row in rows}
    return shown_names({node.peer_id: node.name} | names, width=NAME_WIDTH)


def peer_row(row: Mapping[str, Any], *, now: float) -> Line:
    """Return one cell for each of PEER_COLUMNS."""
    trust_level = str(row.get("trust_level", "good"))
    refused = _refused(row)
    parameters = f" {count(row['parameters'])}" if row.get("parameters") else ""
    model = str(row.get("model") or "-").rsplit("/", 1)[-1]
    return line(
        Span(clipped(row.get("name") or short_id(row["peer_id"]), NAME_WIDTH), Tone.STRONG),
        Span(clipped(model, MODEL_WIDTH - len(parameters)) + parameters),
        Span(trust_level, TRUST_TONES.get(trust_level, Tone.PLAIN)),
        Span(count(row.get("groups_accepted", 0))),
        Span(effective_share(row)),
        Span(count(refused), Tone.WARN if refused else Tone.FAINT),
        Span(count(row.get("groups_confirmed", 0))),
        Span(ago(row.get("last_seen", 0.0), now)),
    )


def peer_lines(row: Mapping[str, Any], *, now: float) -> list[Line]:
    """Return all values of one peer, each line after a label. `now` is Unix time in seconds."""
    from ftis_node.swarm.reasons import sentence

    trust_level = str(row.get("trust_level", "good"))
    version = "" if row.get("policy_version") is None else f", version {row['policy_version']}"
    parameters = f" ({row['parameters']:,} parameters)" if row.get("parameters") else ""
    model = f"{row.get('model') or 'model unknown'}{parameters}, {row.get('role') or 'role unknown'}{version}"
    seen = f"{ago(row['last_seen'], now)} ago" if row.get("last_seen") else "not since the node's start"
    lines = [
        labeled("peer id", row["peer_id"]),
        labeled("name", Span(row.get("name") or "none given", Tone.STRONG)),
        labeled("model", model),
        *([labeled("domain", row["domain"])] if row.get("domain") else []),
        labeled("last seen", seen),
        *([labeled("version", row["wire_words"])] if row.get("wire_words") else []),
        labeled(
            "trust",
            Span(trust_level, TRUST_TONES.get(trust_level, Tone.PLAIN)),
            f", score {number(row.get('score'))}: {TRUST_WORDS.get(trust_level, '')}",
            "; trusted by you" if row.get("trusted") else "",
        ),
    ]
    if row.get("banned_until"):
        reason = str(row.get("ban_reason") or "")
        why = f"for {clipped(reason, REASON_WIDTH)}: {sentence(reason)}; `peers unban` ends it"
        lines.append(labeled("banned", f"until {date_time(row['banned_until'])} {why}"))
    groups = (
        f"{row.get('groups_accepted', 0)} groups accepted since the start; it confirmed "
        f"{row.get('groups_confirmed', 0)} of this node's groups, {row.get('failed_pulls', 0)} fetches from it failed"
    )
    return [
        *lines,
        labeled("groups", groups),
        *(labeled("" if place else "effective", text) for place, text in enumerate(training_words(row))),
        *_tally("refused", "none of its groups since the start", row.get("groups_refused") or {}),
        *_tally("on record", "no faults", row.get("reasons") or {}),
    ]


def effective_share(row: Mapping[str, Any]) -> str:
    """Return the effective fraction of a peer's completions used in training, in percent; `-` if no step used any."""
    return percent((row.get("training") or {}).get("effective"))


def training_words(row: Mapping[str, Any]) -> list[str]:
    """Return the measurements behind that fraction, one on each line."""
    found = row.get("training")
    if not found:
        return ["no step has taken a group of it since the node's start"]
    return [
        f"{effective_share(row)} of its completions, effectively, over its last {found['steps']} steps",
        f"{found['groups']} groups, {percent(found['signal'])} of them of unequal rewards",
        f"{found['completions']} completions, {percent(found['kept'])} kept; "
        f"of the negatives {percent(found['kept_negatives'])}",
        f"ESS {percent(found['ess'])}, mean weight {number(found['weight_mean'])}, "
        f"variance {number(found['weight_variance'])}, clipped {percent(found['clipped'])}",
        f"log ratio {number(found['mean_log_ratio'])} nats a token, KL {number(found['mean_kl'])}, "
        f"truncated {percent(found['truncated'])}",
    ]


def reason_rows(reasons: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return each reason with its count and its sentence, the most frequent first."""
    from ftis_node.swarm.reasons import sentence

    return [
        {"reason": reason, "count": count, "sentence": sentence(reason)}
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    ]


def _tally(label: str, nothing: str, reasons: Mapping[str, int]) -> list[Line]:
    texts = [
        f"{one['count']} x {clipped(one['reason'], REASON_WIDTH)}: {one['sentence']}" for one in reason_rows(reasons)
    ]
    return [labeled("" if place else label, text) for place, text in enumerate(texts or [nothing])]


ORDERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "accepted": lambda row: -row.get("groups_accepted", 0),
    "effective": lambda row: -((row.get("training") or {}).get("effective") or 0.0),
    "refused": lambda row: -_refused(row),
    "trust": lambda row: TRUST_ORDER.get(str(row.get("trust_level", "good")), len(TRUST_ORDER)),
    "confirmed": lambda row: -row.get("groups_confirmed", 0),
    "seen": lambda row: -row.get("last_seen", 0.0),
    "peer": lambda row: str(row.get("name") or row["peer_id"]).casefold(),
    "model": lambda row: str(row.get("model") or "").casefold(),
}


def ban_words(row: Mapping[str, Any]) -> str:
    """Return the commands that change the peer's reputation; the dashboard itself changes nothing."""
    peer_id = printable(row["peer_id"])[-8:]
    verb = "unban" if row.get("trust_level") == "banned" else "ban"
    return f"to change that: ftis-node peers {verb} {peer_id}   (or: trust {peer_id})"


def _refused(row: Mapping[str, Any]) -> int:
    return sum((row.get("groups_refused") or {}).values())
