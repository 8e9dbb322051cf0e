"""`ftis-node report`: one self-contained page about a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.cli.options import HomeOption, home_at
from ftis_node.cli.progress import show_fraction
from ftis_node.errors import ConfigError, UsageError
from ftis_node.files import replace_file
from ftis_node.node.http_api.node_client import read_document, read_status

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.report.facts import Compared


def report(
    home: HomeOption = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    compared: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of `eval --home H --show 5 --json`, for a card.")
    ] = None,
) -> None:
    """Write one page about a run: values, curves, peers, notable events. Works for a running or a stopped node.

    The page loads nothing from a network, and contains no address and no path of this machine. With --compared it
    has five problems with the answers before and after training.
    """
    from ftis_node.report.facts import read_compared

    write_report(home_at(home), out, compared=None if compared is None else read_compared(compared))
    typer.echo(str(out))


def write_report(home: Home, out: Path, *, compared: Compared | None = None) -> None:
    """Write the page about a home's run. Raises ConfigError if no node has run there, UsageError for a bad `out`."""
    from ftis_node.report.facts import gather
    from ftis_node.report.html_page import render_page
    from ftis_node.telemetry.status import NodeStatus, Status

    try:
        status, peers = read_status(home), read_document(home, "/peers")
    except ConfigError:
        if not home.events.exists():
            raise
        status, peers = Status(node=NodeStatus(state="unknown")), []  # it was stopped before it wrote them
    with show_fraction("report") as show:
        facts = replace(gather(home, status=status, peers=peers, on_progress=show), compared=compared)
    try:
        replace_file(out, render_page(facts).encode())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; give another --out") from None
