"""`ftis-node`: the table of commands. It converts an error to one line and an exit code.

Command modules import only what parsing needs, so `--help` and `status` load neither torch, vllm nor hivemind. Help is
plain text, because Rich's boxes double its start-up time. `short_help` is the line in the list of commands, which would
otherwise cut the docstring's first sentence.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import traceback
from typing import NoReturn

import typer

from ftis_node import __version__
from ftis_node.cli import resume_collection
from ftis_node.cli.commands import (
    bootstrap,
    chat,
    compare,
    dashboard,
    demo,
    docs,
    doctor,
    ensemble,
    evaluate,
    export,
    identity,
    join,
    peers,
    replay,
    report,
    status,
    swarm,
    tasks,
    tiny,
)
from ftis_node.cli.operate import invite, pause, service
from ftis_node.config.no_network_env import NO_TELEMETRY
from ftis_node.errors import DamagedError, FtisError, MachineError, UsageError
from ftis_node.files import NO_ROOM
from ftis_node.telemetry.log import (
    discard_output,
    drop_what_cannot_be_written,
    is_json,
    open_closed_files,
    set_up_logging,
)
from ftis_node.telemetry.secrets import redacted, show_traceback
from ftis_node.telemetry.terminal_text import one_line

log = logging.getLogger(__name__)

app = typer.Typer(
    name="ftis-node",
    help="Share the work of GRPO post-training: generate, gossip and train on completions of all peers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("join", short_help="Generate, share and learn: run a node.")(join.join)
app.command("bootstrap", short_help="Run a bootstrap and relay node.")(bootstrap.bootstrap)
app.command("status")(status.status)
app.command("pause", short_help="Pause a running node: it frees memory, and serves peers.")(pause.pause)
app.command("resume", short_help="End a pause.")(pause.resume)
app.command("stop", short_help="Stop a running node.")(pause.stop)
app.command("invite", short_help="Print an invitation with which a friend joins.")(invite.invite)
app.add_typer(service.app, name="service")
app.command("dashboard")(dashboard.dashboard)
app.command("swarm", short_help="Show the peers of a run, and who learns from whom.")(swarm.swarm)
app.add_typer(peers.app, name="peers")
app.add_typer(replay.app, name="replay")
app.command("report")(report.report)
app.add_typer(identity.app, name="identity")
app.command("chat", short_help="Talk to the trained model in the terminal.")(chat.chat)
app.command("try", short_help="Ask the trained model one question.")(chat.ask_once)
app.command("eval")(evaluate.evaluate)
app.command("ensemble", short_help="Evaluate several models together on a task.")(ensemble.ensemble)
app.command("export", short_help="Write the trained model as a model folder.")(export.export)
app.command("tasks", short_help="List the tasks that --task may name.")(tasks.tasks)
app.command("tiny", short_help="Make a small model for experiments.")(tiny.tiny)
app.command("doctor", short_help="Check the machine and say what to change.")(doctor.doctor)
app.command("docs", short_help="Show the documentation that came with this version.")(docs.docs)
app.command("demo", short_help="Train two different tiny models on this machine.")(demo.demo)
app.command("compare", short_help="Compare methods over an in-process network.")(compare.compare)

PROGRAM = "ftis-node"
INTERRUPTED = 130
LASTING = ("join", "bootstrap")  # commands that run until a signal, and must end soon after it
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)  # a path such as --out
EXIT_LIMIT_S = 5.0  # limit for the exit handlers of libraries
_debug = False


def _show_version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks and the libraries' log lines."),
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    global _debug
    _debug = debug
    resume_collection()
    set_up_logging(debug=debug, plain=not debug)


def main() -> None:
    """Run the console script. Exit codes: 0 done, 1 internal fault, 2 wrong use, 3 machine too small, 4 no network."""
    os.environ.update(NO_TELEMETRY)
    sys.excepthook = show_traceback
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like ctrl-C: a command ends its processes cleanly
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    open_closed_files()
    if _is_lasting(sys.argv[1:]):
        drop_what_cannot_be_written()
    code = run(sys.argv[1:])
    if _is_lasting(sys.argv[1:]):
        _end_at_once(code)
    sys.exit(_flushed(code))


def _is_lasting(arguments: list[str]) -> bool:
    return next((word for word in arguments if not word.startswith("-")), "") in LASTING


def _flushed(code: int) -> int:
    """Return the exit code after writing the output; that of MachineError if the disk has no space for it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has ended
        discard_output()
    except OSError as error:
        return code or _output_lost(error)
    return code


def _output_lost(error: OSError) -> int:
    discard_output()
    _print_error(f"cannot write the output ({error.strerror}): free disk space")
    return MachineError.exit_code


def _end_at_once(code: int) -> NoReturn:
    """Exit without the interpreter's cleanup, which takes half a minute with torch. Everything is closed by now."""
    limit = threading.Timer(EXIT_LIMIT_S, os._exit, (code,))
    limit.daemon = True
    limit.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. Errors become one line on stderr."""
    try:
        code = app(arguments, standalone_mode=False, prog_name=PROGRAM)
    except typer.TyperException as error:
        if (message := error.format_message()).startswith("Usage:"):
            typer.echo(message, err=True)  # a command group without a command
        elif message:
            _print_error(f"{message.rstrip('.')}: see --help")
        return error.exit_code
    except FtisError as error:
        return _fail(error, str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not _is_lasting(arguments):
            return 0  # `| head` has ended
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            return _output_lost(error)
        if isinstance(error, OSError) and error.errno in UNUSABLE and error.filename and not _is_lasting(arguments):
            line = f"cannot use {error.filename} ({error.strerror}): give another path, or change its permissions"
            return _fail(error, line, UsageError.exit_code)
        if type(error).__module__ == "sqlite3" and _is_damage(error):
            line = f"a database in the home is damaged ({error}): the next start of the node replaces it"
            return _fail(error, line, DamagedError.exit_code)
        return _fail(error, f"internal fault ({type(error).__name__}: {error}); run with --debug and report it", 1)
    return code if isinstance(code, int) else 0


def _is_damage(error: Exception) -> bool:
    import sqlite3  # imports for 10 ms

    from ftis_node.replay.integrity import is_damage

    return isinstance(error, sqlite3.DatabaseError) and is_damage(error)


def _fail(error: Exception, line: str, code: int) -> int:
    if _debug:
        traceback.print_exception(error)
    _print_error(line)
    return code


def _print_error(line: str) -> None:
    if is_json():
        log.error("%s", one_line(redacted(line)))
        return
    with contextlib.suppress(OSError):  # stderr may be on a full disk; the exit code remains
        typer.echo(f"ftis-node: {one_line(redacted(line))}", err=True)
