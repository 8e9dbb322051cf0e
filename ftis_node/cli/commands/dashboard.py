"""`ftis-node dashboard`: one screen, in the terminal or in a browser."""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from typing import Annotated

import typer

from ftis_node.cli import resume_collection
from ftis_node.cli.options import HomeOption, home_at
from ftis_node.errors import ConfigError, UsageError

DEFAULT_PORT = 8642


def dashboard(
    home: HomeOption = None,
    web: Annotated[bool, typer.Option("--web", help="Serve it in a browser.")] = False,
    host: Annotated[str, typer.Option(help="With --web: address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --web: port.")] = DEFAULT_PORT,
    swarm: Annotated[bool, typer.Option("--swarm", help="Show all peers of the run.")] = False,
    no_curves: Annotated[bool, typer.Option("--no-curves", hidden=True, help="Leave out the curves.")] = False,
    once: Annotated[bool, typer.Option("--once", hidden=True, help="End after the first paint.")] = False,
) -> int:
    """Show live whether a node contributes, learns and is healthy. Works for a stopped node, too.

    Keys: Enter opens a peer, g the groups, e the events, w the swarm, ? explains all terms, q quits. The node keeps
    running.
    """
    where = home_at(home)
    if not (swarm or where.status.exists() or where.settings.exists()):
        raise ConfigError(f"no node has run in {where.root}: give its home with --home")
    if web:
        from ftis_node.cli.commands.swarm import live_page
        from ftis_node.dashboard.web import serve_dashboard
        from ftis_node.report.run_charts import CurveDrawer

        draw = partial(live_page, where) if swarm else CurveDrawer(where).draw
        serve_dashboard(where, draw, host=host, port=port, is_swarm=swarm, show=partial(typer.echo, err=True))
        return 0
    if not (sys.stdin.isatty() and sys.stderr.isatty()) and "TEXTUAL_DRIVER" not in os.environ:
        raise UsageError("the dashboard needs a terminal: use `ftis-node status`, or --web for a browser")
    gc.disable()
    from ftis_node.dashboard.app import DashboardApp

    resume_collection()
    app = DashboardApp(where, is_swarm=swarm, has_curves=not no_curves, once=once)
    app.run()
    return app.return_code or 0
