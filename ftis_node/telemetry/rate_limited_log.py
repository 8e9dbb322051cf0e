"""A fault that comes again and again: all are counted, and a line is due at most once a minute."""

from __future__ import annotations

import errno
import sqlite3
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD_S = 60.0
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


@dataclass(slots=True)
class Seldom:
    """One kind of fault. `count` is how often it came."""

    period_s: float = PERIOD_S
    clock: Callable[[], float] = time.monotonic
    count: int = 0
    _told_at: float | None = field(default=None)

    def is_due(self) -> bool:
        """Counts one more, and says whether it is time for a line about it."""
        self.count += 1
        now = self.clock()
        if self._told_at is not None and now - self._told_at < self.period_s:
            return False
        self._told_at = now
        return True


def is_out_of_files(error: BaseException) -> bool:
    """Whether a process, or the machine, has no file descriptor left: it passes, and is no fault of who needed one.

    SQLite has one code for every file that it cannot open; at a time when the process is at its limit that is why.
    """
    if isinstance(error, OSError):
        return error.errno in NO_DESCRIPTOR
    return isinstance(error, sqlite3.OperationalError) and (
        getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN
    )
