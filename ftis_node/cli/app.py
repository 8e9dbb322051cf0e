"""`ftis-node`: the table of commands, and how an error becomes one line and an exit code.

Command modules import only what parsing needs; the rest is imported when a command runs, so that `--help` and `status`
load neither torch, vllm nor hivemind.
"""

from __future__ import annotations

import signal
import sys

import typer

from ftis_node import __version__
from ftis_node.cli import bootstrap, compare, demo, doctor, evaluate, export, join, peers, replay, status, tiny
from ftis_node.errors import FtisError
from ftis_node.telemetry.log import set_up_logging

app = typer.Typer(
    name="ftis-node",
    help="Share the work of GRPO post-training: generate completions, gossip them, learn from everyone's.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("join")(join.join)
app.command("bootstrap")(bootstrap.bootstrap)
app.command("status")(status.status)
app.command("peers")(peers.peers)
app.add_typer(replay.app, name="replay")
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("tiny")(tiny.tiny)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("compare")(compare.compare)

INTERNAL_FAULT = 1
INTERRUPTED = 130
_debug = False


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks and the libraries' log lines."),
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Options of every command."""
    global _debug
    _debug = debug
    set_up_logging(debug=debug)


def main() -> None:
    """The console script. Exit codes: 0 done, 1 a fault of ours, 2 wrong use, 3 the machine cannot, 4 no network."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as ctrl-C: what a command started is ended in order
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command; its errors become a line on stderr and the exit code that is returned."""
    try:
        code = app(arguments, standalone_mode=False)
    except typer.TyperException as error:
        if message := error.format_message():
            _complain(f"{message.rstrip('.')}: see --help")
        return error.exit_code
    except FtisError as error:
        return _fail(error, str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except Exception as error:
        return _fail(error, f"internal fault ({type(error).__name__}: {error}); run with --debug and report it", 1)
    return code if isinstance(code, int) else 0


def _fail(error: Exception, line: str, code: int) -> int:
    if _debug:
        raise error
    _complain(" ".join(line.split()))
    return code


def _complain(line: str) -> None:
    typer.echo(f"ftis-node: {line}", err=True)
