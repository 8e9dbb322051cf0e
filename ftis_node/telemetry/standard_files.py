"""Standard input, output and error of a daemon, which may be closed, on a full disk, or a pipe without a reader.

Progress and log lines are not essential. A line that cannot be written is dropped, and the node continues.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2


def open_closed_files() -> None:
    """Open /dev/null for each closed standard file, because a later file would otherwise get its descriptor."""
    for number in (STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = open(STANDARD_INPUT, encoding="utf-8", closefd=False)  # open for the lifetime of the process
    if sys.stdout is None:
        sys.stdout = text_that_may_be_lost(STANDARD_OUTPUT)
    if sys.stderr is None:
        sys.stderr = text_that_may_be_lost(STANDARD_ERROR)


def drop_what_cannot_be_written() -> None:
    """Drop output that cannot be written: afterwards standard output and error raise no OSError."""
    open_closed_files()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    sys.stdout = text_that_may_be_lost(STANDARD_OUTPUT, like=sys.stdout)
    sys.stderr = text_that_may_be_lost(STANDARD_ERROR, like=sys.stderr)


def discard_output() -> None:
    """Redirect standard output to /dev/null, so that flushing its buffer at exit raises no error."""
    opened = os.open(os.devnull, os.O_WRONLY)
    os.dup2(opened, STANDARD_OUTPUT)
    os.close(opened)


def text_that_may_be_lost(number: int, *, like: TextIO | None = None) -> TextIO:
    """Return a text stream on a descriptor. It drops lines that it cannot write, and never closes the descriptor."""
    return io.TextIOWrapper(
        _Lossy(number),
        encoding=(like and like.encoding) or "utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )


class _Lossy(io.BufferedIOBase):
    """Unbuffered stream that drops data it cannot write."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.name = f"<standard file {number}>"

    def write(self, data: ReadableBuffer, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with contextlib.suppress(OSError):  # also BlockingIOError: a full non-blocking pipe
            while rest:
                rest = rest[os.write(self._number, rest) :]
        return size

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True
