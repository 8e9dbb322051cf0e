"""Progress of long work on stderr: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOG_PERIOD_S = 10.0


@contextmanager
def show_fraction(title: str) -> Iterator[Callable[[float, str], None]]:
    """Gives a function that takes how much is done (0 to 1) and what is being done."""
    if not sys.stderr.isatty():
        yield _log_now_and_then(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task(title, total=1.0, what="")
        yield lambda fraction, what: bars.update(bar, completed=fraction, what=what)


def _log_now_and_then(title: str) -> Callable[[float, str], None]:
    last_line_at = time.monotonic()

    def show(fraction: float, what: str) -> None:
        nonlocal last_line_at
        if time.monotonic() - last_line_at >= LOG_PERIOD_S:
            last_line_at = time.monotonic()
            typer.echo(f"{title}: {fraction:.0%} {what}", err=True)

    return show
