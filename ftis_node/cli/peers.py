"""`ftis-node peers`: who the node knows, and how their groups fared at the door."""

from __future__ import annotations

import typer

from ftis_node.cli.common import HomeOption, JsonOption, home_at, print_json
from ftis_node.cli.reading import read_document


def peers(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the peers of a node.

    JSON shape: [{peer_id, name, model, parameters, role, policy_version, groups_accepted, groups_refused: {reason: n},
    failed_pulls, groups_confirmed, last_seen}].
    """
    rows = read_document(home_at(home), "/peers")
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo("no peers yet")
    for row in rows:
        refused = ", ".join(f"{reason} {count}" for reason, count in sorted(row["groups_refused"].items())) or "none"
        typer.echo(
            f"{row['peer_id']}  {row['name'] or '-'}  {row['model'] or '-'}  accepted {row['groups_accepted']}, "
            f"refused: {refused}, confirmed {row['groups_confirmed']}"
        )
