"""Memory for bodies between the wire and the disk: each pull takes as much as it may bring, and waits for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class HeldBytes:
    """At most `capacity_bytes` at a time; who needs more than that goes alone. For one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def of(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold that many bytes while the block runs."""
        while self.held_bytes and self.held_bytes + num_bytes > self._capacity_bytes:
            self._changed.clear()
            await self._changed.wait()
        self.held_bytes += num_bytes
        try:
            yield
        finally:
            self.held_bytes -= num_bytes
            self._changed.set()
