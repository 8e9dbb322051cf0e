"""Memory budget for bodies between network and disk: each pull waits until it can reserve its maximum size."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class HeldBytes:
    """Semaphore of `capacity_bytes`. A larger reservation waits until it is the only one. For one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def of(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve `num_bytes` while the block runs."""
        while self.held_bytes and self.held_bytes + num_bytes > self._capacity_bytes:
            self._changed.clear()
            await self._changed.wait()
        self.held_bytes += num_bytes
        try:
            yield
        finally:
            self.held_bytes -= num_bytes
            self._changed.set()
