"""`ftis-node peers`: the node's peers, the results of their groups, bans and trust."""

from __future__ import annotations

import dataclasses
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document
from ftis_node.config.home import Home
from ftis_node.errors import UsageError
from ftis_node.node.http_api.node_client import post_document, read_document
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.terminal_text import columns, date_time

app = typer.Typer(rich_markup_mode=None, help="List peers; ban, unban or trust them.", invoke_without_command=True)

# The variable FTIS_HOME is of the group's option, which comes first: `peers --home DIR ban PEER`.
OwnHomeOption = Annotated[Path | None, typer.Option("--home", help="The node's home folder.", show_default=False)]
PeerArgument = Annotated[str, typer.Argument(help="A peer id, 4 or more characters of its start or end, or a name.")]
HEADER = (
    *("PEER", "NAME", "MODEL", "ROLE", "DOMAIN", "SEEN", "TRUST"),
    *("ACCEPTED", "REFUSED", "CONFIRMED", "EFFECTIVE", "NOTE"),
)
WIDTH = 80  # of one peer
NUM_NEWEST = 5
LENGTH = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
LONGEST_S = 10 * 365 * 86400
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.callback()
def peers(context: typer.Context, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the peers of a node. `peers show` shows one in full; `ban`, `unban` and `trust` change its reputation.

    JSON shape: [{peer_id, name, model, parameters, role, domain, policy_version, groups_accepted,
    groups_refused: {reason: n}, failed_pulls, groups_confirmed, last_seen, trust_level, score, banned_until,
    ban_reason,
    reasons: {reason: n}, trusted, wire_schema, wire_words, training}]. `training` is null before a step took a group of
    the peer, then {steps, groups, completions, kept, kept_negatives, signal, ess, effective, weight_mean,
    weight_variance, clipped, truncated, mean_log_ratio, mean_kl} over its last 20 steps
    (ftis-node docs operate/dashboard).
    """
    context.obj = home
    if context.invoked_subcommand is not None:
        return
    rows = read_document(home_at(home), "/peers")
    print_document(rows, lambda: _table(rows, now=time.time()), as_json=as_json)


@app.command()
def show(context: typer.Context, peer: PeerArgument, home: OwnHomeOption = None, as_json: JsonOption = False) -> None:
    """Show everything about one peer.

    JSON shape: the peer's row in the list, and groups: {ready, taken, released: {reason: n}, tokens, newest: [row of
    `replay list`]}, held_against: [{reason, count, sentence}], refused: [{reason, count, sentence}].
    """
    where = home_at(home or context.obj)
    document = peer_document(where, peer, read_document(where, "/peers"))
    print_document(document, lambda: peer_screen(document, now=time.time()), as_json=as_json)


def peer_document(home: Home, peer: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the peer's row of `rows` with its groups in the buffer. Raises UsageError for an unknown peer."""
    from ftis_node.replay.reader import ReplayReader
    from ftis_node.swarm.peer_rows import find_peer
    from ftis_node.view.peers import reason_rows

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
    from ftis_node.view.peers import peer_lines
    from ftis_node.view.spans import labeled, text_lines

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


@app.command()
def ban(
    context: typer.Context,
    peer: PeerArgument,
    length: Annotated[
        str | None, typer.Option("--for", help="Duration: 90s, 30m, 2h, 7d.", show_default="a day")
    ] = None,
    home: OwnHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ban a peer: the node neither fetches from it nor serves it, and refuses its groups."""
    for_s = None if length is None else parse_length_s(length)
    _change(home or context.obj, "ban", peer, as_json, for_s=for_s)


@app.command()
def unban(context: typer.Context, peer: PeerArgument, home: OwnHomeOption = None, as_json: JsonOption = False) -> None:
    """End a ban and erase the peer's past bans."""
    _change(home or context.obj, "unban", peer, as_json)


@app.command()
def trust(
    context: typer.Context,
    peer: PeerArgument,
    off: Annotated[bool, typer.Option("--off", help="End the trust.")] = False,
    home: OwnHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Trust a peer: the node never bans it, and the peer may fill more of the buffer."""
    _change(home or context.obj, "trust", peer, as_json, trusted=not off)


def parse_length_s(text: str) -> float:
    """Return the seconds of `90s`, `30m`, `2h` or `7d`. Raises UsageError for anything else."""
    match = LENGTH.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) * UNIT_S[match[2]] <= LONGEST_S:
        raise UsageError(f"--for {text!r} is not a duration of at most ten years: write 90s, 30m, 2h or 7d")
    return float(match[1]) * UNIT_S[match[2]]


def _change(path: Any, action: str, peer: str, as_json: bool, **options: Any) -> None:
    row = post_document(home_at(path), f"/peers/{action}", {"peer": peer, **options})
    until = f" until {date_time(row['banned_until'])}" if row["banned_until"] else ""
    print_document(row, lambda: [f"{row['peer_id']} is {row['trust_level']}{until}"], as_json=as_json)


def _table(rows: list[dict[str, Any]], *, now: float) -> list[str]:
    table = [_cells(row, now=now) for row in rows]
    kept = [index for index in range(len(HEADER)) if any(line[index] for line in table)]
    shown = [[line[index] or "-" for index in kept] for line in table]
    return columns([HEADER[index] for index in kept], shown) if rows else ["no peers yet"]


def _cells(row: dict[str, Any], *, now: float) -> tuple[str, ...]:
    from ftis_node.view.peers import effective_share

    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(row["groups_refused"].items())) or "0"
    banned = f"until {date_time(row['banned_until'])} ({row['ban_reason']})" if row.get("banned_until") else ""
    seen = row.get("last_seen")
    return (
        row["peer_id"],
        row["name"] or "-",
        row["model"] or "-",
        row["role"] or "-",
        row.get("domain") or "",
        f"{duration(now - seen)} ago" if seen else "never",
        row.get("trust_level", "good"),
        f"{row['groups_accepted']:,}",
        refused,
        f"{row['groups_confirmed']:,}",
        effective_share(row),
        "; ".join(note for note in (banned, row.get("wire_words")) if note),
    )
