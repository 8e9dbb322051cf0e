"""`ftis-node identity`: show, back up or restore the key that defines a node's peer id."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document
from ftis_node.errors import FileError, UsageError
from ftis_node.files import read_text
from ftis_node.telemetry.terminal_text import date_time

if TYPE_CHECKING:
    from ftis_node.config.home import Home

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, back up or restore a node's key.")

PassphraseFileOption = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="File with the passphrase in its first line.", show_default="ask"),
]


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


@app.command("backup")
def backup(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    home: HomeOption = None,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Ask for a passphrase and encrypt the file.")] = False,
    passphrase_file: PassphraseFileOption = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write the identity to one file. Works while the node runs. Keep the file on another disk."""
    from ftis_node.node.storage.identity_backup import back_up_identity

    passphrase = _passphrase(passphrase_file, again=True) if encrypt or passphrase_file else None
    peer_id = back_up_identity(home_at(home), out, passphrase=passphrase, replace=force)
    typer.echo(f"{out}: the identity {peer_id}")
    if passphrase is None:
        typer.echo("anyone with this file can act as this node: keep it private, or use --encrypt", err=True)


@app.command("restore")
def restore(
    source: Annotated[Path, typer.Argument(help="A file that `identity backup` wrote, or an identity.key.")],
    home: HomeOption = None,
    passphrase_file: PassphraseFileOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace another identity; its key is kept as identity.key.TIME.")
    ] = False,
) -> None:
    """Restore a backed-up identity into a home. Two nodes with one identity must never run at the same time."""
    from ftis_node.node.storage.identity_backup import restore_identity

    done = restore_identity(
        home_at(home), source, ask_passphrase=lambda: _passphrase(passphrase_file, again=False), replace=force
    )
    typer.echo(f"the node is {done.peer_id}" if done.changed else f"the node is {done.peer_id} already")
    if done.kept is not None:
        typer.echo(f"the former key: {done.kept}")


def _passphrase(file: Path | None, *, again: bool) -> str:
    """Return the passphrase from the file or the prompt. Raises UsageError if it is missing or empty."""
    if file is not None:
        try:
            passphrase = read_text(file).split("\n", 1)[0]
        except (OSError, FileError):
            raise UsageError(f"cannot read a passphrase from {file}") from None
    elif not sys.stdin.isatty():
        raise UsageError("a passphrase is needed, but there is no terminal to ask: give --passphrase-file")
    else:
        passphrase = typer.prompt("passphrase", hide_input=True, confirmation_prompt=again, err=True)
    if not passphrase:
        raise UsageError("the passphrase is empty")
    return passphrase


def _addresses(home: Home) -> list[str] | None:
    """Return the addresses of the running node; None if none is running."""
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
