"""`ftis-node bootstrap`: a meeting point for nodes that do not know each other yet."""

from __future__ import annotations

from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, home_at


def bootstrap(
    home: HomeOption = None,
    listen: Annotated[list[str] | None, typer.Option("--listen", help="Multiaddr to listen on. Repeatable.")] = None,
    peers: Annotated[list[str] | None, typer.Option("--peers", help="Another bootstrap's multiaddr.")] = None,
) -> None:
    """Run a meeting point and relay; prints one dialable address per line, then serves until stopped.

    It holds no model and no rollouts. Give one of its lines to `join --peers`.
    """
    from ftis_node.node.meeting_point import run_meeting_point

    run_meeting_point(home_at(home), listen=tuple(listen or ()), peers=tuple(peers or ()), show=_show_addresses)


def _show_addresses(addresses: list[str]) -> None:
    for address in addresses:
        typer.echo(address)
