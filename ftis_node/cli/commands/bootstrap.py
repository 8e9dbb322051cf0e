"""`ftis-node bootstrap`: a node through which other nodes find each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.options import HomeOption, LogFormatOption, home_at
from ftis_node.errors import ConfigError, UsageError
from ftis_node.files import replace_file
from ftis_node.telemetry.log import log_as_json

PUBLIC = 0o644


def bootstrap(
    home: HomeOption = None,
    listen: Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on. Repeatable.")] = None,
    peers: Annotated[list[str] | None, typer.Option(help="Multiaddr of another bootstrap node. Repeatable.")] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MADDR",
            help="Address to announce instead of the detected ones, such as /dns4/NAME/tcp/4001. Repeatable.",
        ),
    ] = None,
    status_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Local HTTP port of its page; 0: any free port.")
    ] = 0,
    runs: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            metavar="RUN_ID",
            help="Run that its page shows and that it forwards first; without it all, the largest first. Repeatable.",
        ),
    ] = None,
    log_format: LogFormatOption = "text",
    address_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the addresses, to use with --peers @FILE.")
    ] = None,
) -> None:
    """Run a bootstrap and relay node. Prints one address per line, then serves until stopped.

    It holds no model and no rollouts. Give one of the printed lines to `join --peers`. The home keeps its peer id.
    """
    if log_format == "json":
        log_as_json()
    from ftis_node.bootstrap.daemon import run_bootstrap_node
    from ftis_node.node.startup.run_plan import is_run_id

    if not all(map(is_run_id, runs or ())):
        raise UsageError("--run takes a run id: `ftis-node status --json` of a member has it as run.id")

    run_bootstrap_node(
        home_at(home),
        listen=tuple(listen or ()),
        peers=tuple(peers or ()),
        announce=tuple(announce or ()),
        status_port=status_port,
        runs=tuple(runs or ()),
        show=partial(_show_addresses, address_file),
    )


def _show_addresses(address_file: Path | None, addresses: list[str]) -> None:
    for address in addresses:
        typer.echo(address)
    if address_file is not None:
        try:  # atomic: a process that waits for the file never reads half of it
            replace_file(address_file, "".join(f"{address}\n" for address in addresses).encode())
            address_file.chmod(PUBLIC)  # the process creates private files by default
        except OSError as error:
            raise ConfigError(f"--address-file {address_file} cannot be written: {error.strerror}") from None
