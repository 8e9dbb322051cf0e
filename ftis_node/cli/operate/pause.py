"""`ftis-node pause`, `resume` and `stop`: end the work of a running node for a while, or the node."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, Any

import typer

from ftis_node.cli.commands.peers import parse_length_s
from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document
from ftis_node.config.home import Home
from ftis_node.errors import ConfigError, FtisError, UsageError
from ftis_node.node.http_api.node_client import post_document, read_status
from ftis_node.telemetry.health_summary import pause_words

POLL_S = 0.2
SHOWN_AFTER_S = 3.0

ForOption = Annotated[
    str | None, typer.Option("--for", metavar="TIME", help="Duration: 90s, 30m, 2h, 7d.", show_default="no limit")
]


def pause(length: ForOption = None, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Pause a running node: it frees the memory of its workers and still serves its peers. A restart keeps the pause.

    The step in progress ends first. JSON shape: {reason, until, in_effect}.
    """
    _change("pause", length, home_at(home), as_json=as_json)


def resume(
    length: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TIME", help="Run for this time whatever the schedule says.", show_default="by schedule"
        ),
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a pause. The schedule of the settings applies again, with --for later.

    JSON shape: {reason, until, in_effect}.
    """
    _change("resume", length, home_at(home), as_json=as_json)


def stop(home: HomeOption = None) -> None:
    """Stop a running node as ctrl-C does, and wait until it has saved and ended."""
    where = home_at(home)
    pid = where.holder()
    if pid is None:
        raise ConfigError(f"no node runs in {where.root}: give its home with --home")
    try:
        if where.is_opened_by(pid):
            os.kill(pid, signal.SIGTERM)
        elif where.is_held():
            raise UsageError(
                f"the node in {where.root} runs in another container: stop it there, or stop the container"
            )
    except ProcessLookupError:  # it has just ended
        pass
    except PermissionError:
        raise UsageError(f"the node in {where.root} belongs to another user: stop it as that user") from None
    _wait_for_end(where)
    typer.echo(_end_words(where))


def _end_words(home: Home) -> str:
    """Return what an ended node has saved, by its last status and its newest checkpoint."""
    from ftis_node.workers.durable import checkpoint_step

    try:
        status = read_status(home)
    except FtisError as error:
        return f"stopped: what is saved is unknown, {error}"
    step, saved = status.learner.step, checkpoint_step(home.checkpoints)
    if status.node.role in ("full", "learner") and saved < step:
        return f"stopped: of {step} steps only {saved} are saved in {home.root}: see its logs/"
    return f"stopped: all is saved in {home.root}"


def _wait_for_end(home: Home) -> None:
    from ftis_node.config.workers import SAVE_LIMIT_S

    limit_s = SAVE_LIMIT_S + 60.0  # the node forces its own end before that
    began_at, shown = time.monotonic(), ""
    while home.is_held():
        waited_s = time.monotonic() - began_at
        if waited_s > limit_s:
            raise FtisError(f"the node in {home.root} has not ended within {limit_s:.0f} s: see its logs/")
        if waited_s > SHOWN_AFTER_S and (waits_for := _waits_for(home)) not in ("", shown):
            typer.echo(f"stopping: it waits for {waits_for}", err=True)
            shown = waits_for
        time.sleep(POLL_S)


def _waits_for(home: Home) -> str:
    try:
        return read_status(home).node.waits_for
    except FtisError:  # its port is closed: it ends
        return ""


def _change(action: str, length: str | None, home: Home, *, as_json: bool) -> None:
    for_s = None if length is None else parse_length_s(length)
    answer = post_document(home, f"/{action}", {} if for_s is None else {"for_s": for_s})
    print_document(answer, lambda: [_words(action, answer)], as_json=as_json)


def _words(action: str, answer: dict[str, Any]) -> str:
    if not answer["reason"]:
        return "resumed: the workers load the model"
    words = pause_words(answer["reason"], answer["until"], now=time.time())
    if action == "resume":
        return f"{words}; `ftis-node resume --for 2h` runs it for this time"
    return words if answer["in_effect"] else f"{words}; the step in progress ends first, then memory is free"
