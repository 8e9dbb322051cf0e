"""`ftis-node status`: one screen that shows whether the node contributes, learns and is healthy.

The first line has the three answers. If one is not yes, the next lines say why and what to do. Terminals and log files
get the same text. `--watch` repaints it on a terminal and appends one line per update elsewhere.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_json, print_line
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document, repeated

if TYPE_CHECKING:
    from ftis_node.config.home import Home

REPAINT = "\x1b[H"  # moves the cursor to the upper left corner
REST_OF_LINE = "\x1b[K"
REST_OF_SCREEN = "\x1b[J"


def status(
    home: HomeOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update until ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=86400, metavar="SECONDS", help="Seconds between updates.")
    ] = 2.0,
) -> None:
    """Show what a node does, or last did: is it contributing, learning, healthy?

    JSON shape: {schema, node, run, model, generation, learner, swarm, replay, eval: [{step, task, pass_at_1, n}],
    limits, budget: {generate_tokens, learn_steps, learn_tokens: each {used, limit, left}},
    health: {healthy, ready, problems: [..], waits_for, taken_at, event_loop_lag_s, event_loop_lag_longest_s,
    loops: [{name, waits_for, for_s}]}}; with --watch one line per update.
    """
    where = home_at(home)
    if watch:
        _watch(where, as_json=as_json, interval_s=interval_s)
        return
    document = read_document(where, "/status")
    if as_json:
        print_json(document)
        return
    from ftis_node.cli.status_screen import screen

    typer.echo("\n".join(screen(document, now=time.time())))


def _watch(home: Home, *, as_json: bool, interval_s: float) -> None:
    """Show updates until ctrl-C, even if the node stops or restarts."""
    show = print_line if as_json else (_repaint if sys.stdout.isatty() else _append)
    if show is _repaint:
        sys.stdout.write(REPAINT + REST_OF_SCREEN)
    try:
        for snapshot in repeated(lambda: read_document(home, "/status"), interval_s):
            show(snapshot)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if show is _repaint:
            typer.echo()


def _repaint(snapshot: dict[str, Any] | FtisError) -> None:
    from shutil import get_terminal_size

    from ftis_node.cli.status_screen import screen
    from ftis_node.telemetry.terminal_text import wrapped

    size = get_terminal_size()
    clock = time.strftime("%H:%M:%S")
    lines = wrapped(f"{snapshot}; trying again", size.columns - 1) if isinstance(snapshot, FtisError) else []
    if not isinstance(snapshot, FtisError):
        lines = screen(snapshot, now=time.time(), width=min(size.columns, 100) - 1)
    shown = [*lines[: size.lines - 2], f"{clock}, updated until ctrl-C"]
    sys.stdout.write(REPAINT + "".join(f"{line}{REST_OF_LINE}\n" for line in shown) + REST_OF_SCREEN)


def _append(snapshot: dict[str, Any] | FtisError) -> None:
    from ftis_node.cli.status_screen import log_line
    from ftis_node.telemetry.terminal_text import printable

    clock = time.strftime("%Y-%m-%dT%H:%M:%S")
    text = printable(str(snapshot)) if isinstance(snapshot, FtisError) else log_line(snapshot, now=time.time())
    typer.echo(f"{clock} {text}")
