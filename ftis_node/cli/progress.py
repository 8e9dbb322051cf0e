"""Progress of long work on stderr: on a terminal a bar with the time left, in a log one line per period.

The bar disappears at the end. A dumb terminal or a file gets only whole lines, the first after a full period.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from ftis_node.telemetry.health_summary import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Task

    from ftis_node.telemetry.log import OnProgress

LOG_PERIOD_S = 10.0
MIN_FRACTION = 0.005  # fraction done before the estimate of the time left is shown


@dataclass(slots=True)
class ProgressState:
    """Progress of a piece of work. `fraction` is None if it is unknown."""

    title: str
    fraction: float | None = None
    what: str = "starting"
    began_at: float = field(default_factory=time.monotonic)

    def update(self, fraction: float | None, what: str) -> None:
        """Update the state. A restart of the fraction, or a different text without a fraction, restarts the clock."""
        is_other = what != self.what if fraction is None else self.fraction is None or fraction < self.fraction
        if is_other:
            self.began_at = time.monotonic()
        self.fraction, self.what = fraction, what

    def time(self) -> str:
        """Return `about 3 min left`, or the time so far if the end is unknown."""
        elapsed_s = time.monotonic() - self.began_at
        if self.fraction is None:
            return f"{duration(elapsed_s)} so far"
        if self.fraction < MIN_FRACTION:
            return ""
        return f"about {duration(elapsed_s * (1 - self.fraction) / self.fraction)} left"

    def done(self) -> str:
        percent = "" if self.fraction is None else f"{self.fraction:.0%} "
        return f"{self.title}: {percent}{self.what}"

    def line(self) -> str:
        return ", ".join(filter(None, (self.done(), self.time())))


@contextmanager
def show_fraction(title: str, *, log_period_s: float = LOG_PERIOD_S) -> Iterator[OnProgress]:
    """Yield a function that takes the fraction done (0 to 1, or None) and a text. A call without text shows nothing."""
    work = ProgressState(title)
    if sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        with _bar(work) as tell:
            yield tell
        return
    is_over = threading.Event()
    lines = threading.Thread(target=_write_lines, args=(work, is_over, log_period_s), name="progress", daemon=True)
    lines.start()
    try:
        yield work.update
    finally:
        is_over.set()
        lines.join()


def _write_lines(work: ProgressState, is_over: threading.Event, period_s: float) -> None:
    """Write a line per period. While a known fraction does not change, its line is not repeated."""
    written = ""
    while not is_over.wait(period_s):
        done = work.done()
        if work.what and (work.fraction is None or done != written):
            typer.echo(work.line(), err=True)
            written = done


@contextmanager
def _bar(work: ProgressState) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
    from rich.table import Column
    from rich.text import Text

    class TimeColumn(ProgressColumn):
        """Column with the time of `ProgressState`, updated at each redraw."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            return Text(work.time(), style="dim")

    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=14),
        TextColumn(
            "{task.fields[what]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        ),
        TimeColumn(),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
    bar = bars.add_task(work.title, total=None, what=work.what)
    bars.start()

    def draw(fraction: float | None, what: str) -> None:
        work.update(fraction, what)
        if not what:
            bars.stop()
            return
        if not bars.live.is_started:
            bars.start()
        bars.update(bar, total=None if fraction is None else 1.0, completed=fraction or 0.0, what=what)

    try:
        yield draw
    finally:
        bars.stop()
