"""Standard input, output and error of a process that runs for days: closed, on a full disk, or a pipe nobody reads.

Lines of progress and of the log are no work of a node. What cannot be written is dropped, and the node goes on.
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
    """Put /dev/null where a standard file is closed, so that no other file gets its number: programs write there."""
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
        sys.stdin = open(STANDARD_INPUT, encoding="utf-8", closefd=False)  # for the process's life
    if sys.stdout is None:
        sys.stdout = text_that_may_be_lost(STANDARD_OUTPUT)
    if sys.stderr is None:
        sys.stderr = text_that_may_be_lost(STANDARD_ERROR)


def drop_what_cannot_be_written() -> None:
    """Drop output that cannot be written: from now on standard output and error raise no OSError."""
    open_closed_files()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    sys.stdout = text_that_may_be_lost(STANDARD_OUTPUT, like=sys.stdout)
    sys.stderr = text_that_may_be_lost(STANDARD_ERROR, like=sys.stderr)


def discard_output() -> None:
    """What is left in the buffer of standard output goes to /dev/null, so that the end of the process is silent."""
    opened = os.open(os.devnull, os.O_WRONLY)
    os.dup2(opened, STANDARD_OUTPUT)
    os.close(opened)


def text_that_may_be_lost(number: int, *, like: TextIO | None = None) -> TextIO:
    """Return a text stream on a descriptor, which stays open; a line that cannot be written is dropped."""
    return io.TextIOWrapper(
        _Lossy(number),
        encoding=(like and like.encoding) or "utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )


class _Lossy(io.BufferedIOBase):
    """Writes at once, or not at all."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.name = f"<standard file {number}>"

    def write(self, data: ReadableBuffer, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with contextlib.suppress(OSError):  # also BlockingIOError: a pipe that is full and not waited for
            while rest:
                rest = rest[os.write(self._number, rest) :]
        return size

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True
