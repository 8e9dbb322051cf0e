"""The home's disk space: its limit, the last measurement, and a wait until there is space again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ftis_node.node.storage.usage import HomeLimit

if TYPE_CHECKING:
    from ftis_node.node.storage.usage import HomeUse

UNLIMITED_BYTES = 1 << 60


class DiskSpace:
    """Gate that is closed while the home is full. Open until the first measurement. For one event loop."""

    def __init__(self, limit: HomeLimit | None = None) -> None:
        """If `limit` is None, only the size of the disk limits the home."""
        self.limit = limit or HomeLimit(UNLIMITED_BYTES, reserve_bytes=0)
        self.use: HomeUse | None = None
        self.why_full = ""
        self._has_space = asyncio.Event()
        self._has_space.set()

    async def wait_available(self) -> None:
        """Wait until there is space for another group."""
        await self._has_space.wait()

    def note(self, use: HomeUse) -> None:
        """Store a new measurement, and open or close the gate."""
        self.use = use
        self.why_full = self.limit.why_full(use, was_full=bool(self.why_full))
        if self.why_full:
            self._has_space.clear()
        else:
            self._has_space.set()
