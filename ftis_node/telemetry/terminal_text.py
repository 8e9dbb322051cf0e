"""Untrusted text on a terminal: names and completions of peers may contain terminal commands.

Characters that are not printable are escaped as in a Python string: `\x1b`. These are control characters, escape
sequences, and marks that change the direction of writing. Widths are in terminal cells.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0\U0001d159")  # letters and symbols that look like a space
ELLIPSIS = "…"
MAX_MARKS = 64  # characters in one cell, most of them of no width
MAX_VALUE = 200  # characters of one value in an error message
MAX_LINE = 2000
LONG_VALUE = re.compile(r"""(?<!\w)'[^']{201,}'|(?<!\w)"[^"]{201,}"|\S{201,}""")
MIB, GIB = 1 << 20, 1 << 30
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(num_bytes: float) -> str:
    """Return a byte count in decimal units: `1.5 GB`, `212 MB`."""
    for limit, unit in UNITS:
        if num_bytes >= limit:
            scaled = num_bytes / limit
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def in_gib(num_bytes: int) -> str:
    """Return a byte count in binary units: `1.50 GiB`."""
    return f"{num_bytes / GIB:.2f} GiB"


def date_time(unix_s: float) -> str:
    """Return the local date and time: `2026-05-04 12:30:01`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def printable(text: str, *, keep_newlines: bool = False) -> str:
    """Return the text with non-printable characters escaped, safe on one line of a terminal."""
    kept = "\n" if keep_newlines else ""
    return "".join(
        mark if (mark.isprintable() and mark not in BLANK) or mark in kept else ascii(mark)[1:-1] for mark in text
    )


def one_line(text: str) -> str:
    """Return an error's text as one line of bounded length, with control characters escaped and long values cut."""
    line = " ".join(printable(text[: 16 * MAX_LINE].replace("\n", " ")).split())
    line = LONG_VALUE.sub(lambda found: _ends_of(found[0], MAX_VALUE), line)
    return _ends_of(line, MAX_LINE)


def _ends_of(text: str, length: int) -> str:
    """Return a long text without its middle, between words, because both ends carry information."""
    if len(text) <= length:
        return text
    head, tail = text[: length // 2], text[-(length // 2) + 1 :]
    return f"{head[: head.rfind(' ') + 1] or head}{ELLIPSIS}{tail[max(0, tail.find(' ')) :]}"


def cells(text: str) -> int:
    """Return the width of printable text in terminal cells."""
    from rich.cells import cell_len  # help needs no widths

    return cell_len(text)


def clipped(text: str, width: int) -> str:
    """Return printable text in at most `width` cells, with an ellipsis if it was cut. Its time has a bound."""
    shown = printable(text[: MAX_MARKS * width])
    if len(text) <= MAX_MARKS * width and cells(shown) <= width:
        return shown
    return (cut(shown, width - 1)[0] if width > 1 else "") + ELLIPSIS


def wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Return printable text as lines of at most `width` cells, broken between words. Indent all but the first."""
    lines = [""]
    for word in printable(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else lines[-1] + word
        if cells(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(" " * indent + clipped(word, width - indent))
    return [line for line in lines if line.strip()]


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = MAX_LINE) -> list[str]:
    """Return a table of printable text: a header and one line per row, each column as wide as its widest cell.

    The first `num_left` columns are aligned left, the others right.
    """
    table = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        gaps = [" " * (width - cells(cell)) for cell, width in zip(row, widths, strict=True)]
        padded = [
            cell + gap if place < num_left else gap + cell
            for place, (cell, gap) in enumerate(zip(row, gaps, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def cut(text: str, width: int) -> list[str]:
    """Return all of a printable text in pieces of at most `width` cells, which is 1 or more; at least one piece."""
    from rich.cells import chop_cells

    shown = printable(text)
    return chop_cells(shown, max(1, width)) or [shown]
