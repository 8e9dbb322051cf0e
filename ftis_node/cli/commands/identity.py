"""`ftis-node identity`: the peer id of a key file, also before the node's first start."""

from __future__ import annotations

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show a node's peer id.")


@app.command("show")
def show(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show the peer id of the key in the home, also before the first start.

    JSON shape: {peer_id, key_file}.
    """
    from ftis_node.records.identity import Identity

    key_file = home_at(home).identity
    document = {"peer_id": Identity.load(key_file).peer_id, "key_file": str(key_file)}
    lines = [f"peer id    {document['peer_id']}", f"key file   {document['key_file']}"]
    print_document(document, lambda: lines, as_json=as_json)
