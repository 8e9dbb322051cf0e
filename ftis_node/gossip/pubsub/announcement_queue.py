"""Bounded queue of received announcements. A full queue drops and counts the oldest: new ones are worth more."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ftis_node.gossip.interface import GossipCounters, GossipMessage


class AnnouncementQueue:
    """Drop-oldest queue with one reader, within one event loop."""

    def __init__(self, *, capacity: int, counters: GossipCounters) -> None:
        self._waiting: deque[GossipMessage] = deque(maxlen=capacity)
        self._counters = counters
        self._changed = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, announcement: GossipMessage) -> None:
        """Add a message; drops the oldest if the queue is full."""
        self._counters.announcements_received += 1
        if len(self._waiting) == self._waiting.maxlen:
            self._counters.announcements_dropped += 1
        self._waiting.append(announcement)
        self._changed.set()

    def close(self, error: BaseException | None = None) -> None:
        """End the reader's iteration after the queued messages; with `error`, raise it there."""
        self._closed = True
        self._error = error
        self._changed.set()

    async def drain(self) -> AsyncIterator[GossipMessage]:
        """Yield messages as they arrive, until closed."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._changed.clear()
            await self._changed.wait()
