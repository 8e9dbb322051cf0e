"""`ftis-node join --detach`: a node without a terminal. It logs to `logs/node.log` in its home."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import typer

from ftis_node.config.home import Home
from ftis_node.errors import UsageError
from ftis_node.files import open_to_write

FLAG = "--detach"
POLL_S = 0.2
SHOWN_LINES = 3


def join_detached(words: Sequence[str], home: Home, *, invitation: str | None = None) -> None:
    """Run the command `words` without --detach in a new session. Return when the node runs.

    An invitation goes through a pipe: every user of the machine can read the words of a process.
    Raise typer.Exit with its exit code if it ends before that. Raise UsageError if a node runs on this home.
    """
    if home.is_held():
        raise UsageError(f"a node runs in {home.root}: `ftis-node stop` ends it")
    home.make_logs()
    log = home.logs / "node.log"
    with os.fdopen(open_to_write(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        begins_at = output.tell()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ftis_node",
                *("-" if word == invitation else word for word in words if word != FLAG),
            ],
            stdin=subprocess.DEVNULL if invitation is None else subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # the signals of this terminal do not reach it
        )
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin:  # it has ended, and its log says why
            process.stdin.write(f"{invitation}\n".encode())
    typer.echo(f"starting as process {process.pid}; its log is {log}")
    while home.holder() != process.pid or home.running_url() is None:
        if (code := process.poll()) is not None:
            typer.echo(_tail(log, begins_at), err=True)
            raise typer.Exit(code)
        time.sleep(POLL_S)
    options = shlex.join(["--home", str(home.root)])
    for what, command in (("it runs", "status"), ("a friend", "invite"), ("stop it", "stop")):
        typer.echo(f"{what + ':':10} ftis-node {command} {options}")


def _tail(log: Path, begins_at: int) -> str:
    with log.open("rb") as file:
        file.seek(begins_at)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-SHOWN_LINES:])
