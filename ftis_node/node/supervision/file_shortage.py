"""Periodic work while no file descriptor is free: a run of it is skipped and counted."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable

from ftis_node.node.supervision.process_limits import open_files
from ftis_node.telemetry.log import RateLimitedLog, is_out_of_files

log = logging.getLogger(__name__)


class FileShortage:
    """Skips a run of periodic work while no file descriptor is free, and counts the skipped runs."""

    def __init__(self) -> None:
        self._seldom = RateLimitedLog()

    @property
    def count(self) -> int:
        return self._seldom.count

    async def skipped_at(self, work: Callable[[], Awaitable[object]]) -> None:
        """Await `work`; count a lack of file descriptors and log it once a minute. Raise all other errors."""
        try:
            await work()
        except (OSError, sqlite3.OperationalError) as error:
            if not is_out_of_files(error):
                raise
            if self._seldom.is_due():
                limit = open_files().soft
                log.warning(
                    "no file can be opened (%s; limit %d, %d times so far): this work is skipped once",
                    *(error, limit, self.count),
                )
