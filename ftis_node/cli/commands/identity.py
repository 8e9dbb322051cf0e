"""`ftis-node identity`: show the key that defines a node's peer id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document
from ftis_node.telemetry.terminal_text import date_time

if TYPE_CHECKING:
    from ftis_node.config.home import Home

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show a node's key.")


@app.command("show")
def show(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show the node's peer id, its key file and, if it runs, its addresses.

    JSON shape: {peer_id, key_file, created_at, running, addresses: [..]}.
    """
    from ftis_node.records.identity import Identity

    place = home_at(home)
    identity = Identity.load(place.identity)
    addresses = _addresses(place)
    document = {
        "peer_id": identity.peer_id,
        "key_file": str(place.identity),
        "created_at": place.identity.stat().st_mtime,
        "running": addresses is not None,
        "addresses": addresses or [],
    }
    print_document(document, lambda: _lines(document), as_json=as_json)


def _addresses(home: Home) -> list[str] | None:
    from ftis_node.node.http_api.node_client import read_document

    if home.running_url() is None:
        return None
    return [str(address) for address in read_document(home, "/status")["node"]["addresses"]]


def _lines(document: dict[str, Any]) -> list[str]:
    return [
        f"peer id    {document['peer_id']}",
        f"key file   {document['key_file']} (made {date_time(document['created_at'])})",
        *(f"address    {address}" for address in document["addresses"]),
        *(() if document["running"] else ("address    none: no node runs with this home",)),
    ]
