"""`ftis-node status`: lines that show whether the node contributes, learns and is healthy.

The first line has the three answers. If one is not yes, the next lines say why and what to do. `--watch` repaints the
screen on a terminal, and appends one line per update elsewhere.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_json
from ftis_node.node.http_api.node_client import read_document, read_status

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.view.snapshot import MachineUsage


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
    pause: {reason, until, in_effect, resumed_at},
    health: {healthy, ready, problems: [..], waits_for, taken_at, event_loop_lag_s, event_loop_lag_longest_s}};
    with --watch one line per update.
    """
    where = home_at(home)
    if as_json and not watch:
        print_json(read_document(where, "/status"))
        return
    from ftis_node.cli.status_screen import WIDEST, WIDTH, log_line, screen

    if not watch:
        width = min(get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else WIDTH
        typer.echo("\n".join(screen(read_status(where), now=time.time(), width=width, machine=_machine(where))))
        return
    from ftis_node.cli.watch import watch as show_until_interrupt

    show_until_interrupt(
        partial(read_document, where, "/status") if as_json else partial(read_status, where),
        screen=lambda status, width: screen(status, now=time.time(), width=min(width, WIDEST), machine=_machine(where)),
        log_text=lambda status: log_line(status, now=time.time()),
        interval_s=interval_s,
        as_json=as_json,
    )


def _machine(home: Home) -> MachineUsage:
    """Return the memory, and the power of the GPUs, while a node runs on the home."""
    from ftis_node.dashboard.watcher import read_machine
    from ftis_node.view.snapshot import MachineUsage

    return read_machine(home) if home.is_held() else MachineUsage()
