"""`--watch` of a command: the newest document again and again until ctrl-C, even if the node stops or restarts.

A terminal gets a screen that is repainted, everything else appended lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from shutil import get_terminal_size
from typing import Any

import typer

from ftis_node.cli.options import print_line
from ftis_node.errors import FtisError, UsageError
from ftis_node.telemetry.health_summary import plural
from ftis_node.telemetry.terminal_text import printable, wrapped

REPAINT = "\x1b[H"  # moves the cursor to the upper left corner
REST_OF_LINE = "\x1b[K"
REST_OF_SCREEN = "\x1b[J"


def watch(
    read: Callable[[], Any],
    *,
    screen: Callable[[Any, int], Iterable[str]],
    log_text: Callable[[Any], str],
    interval_s: float,
    as_json: bool,
) -> None:
    """Show what `read` returns, or its FtisError, every `interval_s`. Raises the UsageError of the first read.

    `screen` takes a document and the width of the terminal. `log_text` returns a document for a log.
    """
    is_screen = sys.stdout.isatty() and not as_json
    if is_screen:
        sys.stdout.write(REPAINT + REST_OF_SCREEN)
    has_read = False
    try:
        while True:
            try:
                document = read()
            except FtisError as error:
                if isinstance(error, UsageError) and not has_read:
                    raise
                document = error
            has_read = True
            if as_json:
                print_line(document)
            elif is_screen:
                _repaint(document, screen)
            else:
                text = printable(str(document)) if isinstance(document, FtisError) else log_text(document)
                typer.echo(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}")
            sys.stdout.flush()
            time.sleep(interval_s)
    except KeyboardInterrupt:
        if is_screen:
            typer.echo()


def _repaint(document: Any, screen: Callable[[Any, int], Iterable[str]]) -> None:
    size = get_terminal_size()
    width = size.columns - 1
    is_error = isinstance(document, FtisError)
    lines = wrapped(f"{document}; trying again", width) if is_error else list(screen(document, width))
    shown = lines[: size.lines - 2]
    rest = f"; {plural(hidden, 'more line')} below" if (hidden := len(lines) - len(shown)) else ""
    shown.append(f"{time.strftime('%H:%M:%S')}, updated until ctrl-C{rest}")
    sys.stdout.write(REPAINT + "".join(f"{line}{REST_OF_LINE}\n" for line in shown) + REST_OF_SCREEN)
