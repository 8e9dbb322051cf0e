"""Gossipsub subscriptions of one node, across restarts of p2pd.

A change loses no messages, because the node subscribes to new topics before it leaves old ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

T = TypeVar("T", int, str)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection
    from contextlib import AbstractAsyncContextManager

    from ftis_node.gossip.types import GossipCounters, GossipMessage

    Subscribe = Callable[[T], AbstractAsyncContextManager[AsyncIterator[GossipMessage]]]


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
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._changed.clear()
            await self._changed.wait()


class Subscriptions(Generic[T]):
    """The chosen topics (a node names them by their shards), and one reader task for each."""

    def __init__(self, topics: Collection[T], *, on_message: Callable[[T, GossipMessage], None]) -> None:
        self._chosen: frozenset[T] = frozenset(topics)
        self._on_message: Callable[[T, GossipMessage], None] = on_message
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._is_following = False

    async def choose(self, topics: Collection[T]) -> None:
        """Read these topics from now on; return when all are subscribed.

        Returns at once if p2pd is down; the choice then applies from its next start.
        """
        if frozenset(topics) != self._chosen:
            self._chosen = frozenset(topics)
            self._settled.clear()
            self._changed.set()
        if self._is_following:
            await self._settled.wait()

    async def settled(self) -> None:
        await self._settled.wait()

    async def follow(self, subscribe: Subscribe[T]) -> None:
        """Read the chosen topics until canceled. Raises OSError or EOFError in a group if p2pd is lost."""
        reading: dict[T, asyncio.Task[None]] = {}
        self._settled.clear()
        self._is_following = True
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._changed.clear()
                    chosen = self._chosen
                    for topic in sorted(chosen - set(reading)):
                        subscribed = asyncio.Event()
                        reader = self._read(subscribe, topic, subscribed)
                        reading[topic] = group.create_task(reader, name=f"topic {topic}")
                        await subscribed.wait()
                    for topic in set(reading) - chosen:
                        reading.pop(topic).cancel()
                    if chosen == self._chosen:
                        self._settled.set()
                        await self._changed.wait()
        finally:
            self._is_following = False
            self._settled.set()  # wakes waiting tasks, because no subscription will follow

    async def _read(self, subscribe: Subscribe[T], topic: T, subscribed: asyncio.Event) -> None:
        async with subscribe(topic) as messages:
            subscribed.set()
            async for message in messages:
                self._on_message(topic, message)
