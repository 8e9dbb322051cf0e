"""`ftis-node status`: lines that show whether the node contributes, learns and is healthy.

The first line has the three answers. If one is not yes, the next lines say why and what to do.
"""

from __future__ import annotations

import sys
import time
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_json
from ftis_node.node.http_api.node_client import read_document, read_status

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.view.snapshot import MachineUsage


def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show what a node does, or last did: is it contributing, learning, healthy?

    JSON shape: {schema, node, run, model, generation, learner, swarm, replay, eval: [{step, task, pass_at_1, n}],
    limits, budget: {generate_tokens, learn_steps, learn_tokens: each {used, limit, left}},
    pause: {reason, until, in_effect, resumed_at},
    health: {healthy, ready, problems: [..], waits_for, taken_at, event_loop_lag_s, event_loop_lag_longest_s}}.
    """
    where = home_at(home)
    if as_json:
        print_json(read_document(where, "/status"))
        return
    from ftis_node.cli.status_screen import WIDEST, WIDTH, screen

    width = min(get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else WIDTH
    typer.echo("\n".join(screen(read_status(where), now=time.time(), width=width, machine=_machine(where))))


def _machine(home: Home) -> MachineUsage:
    """Return the memory, and the power of the GPUs, while a node runs on the home."""
    from ftis_node.dashboard.watcher import read_machine
    from ftis_node.view.snapshot import MachineUsage

    return read_machine(home) if home.is_held() else MachineUsage()
