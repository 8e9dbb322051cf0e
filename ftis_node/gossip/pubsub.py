"""Gossipsub subscriptions of one node, across restarts of p2pd.

A change loses no messages, because the node subscribes to new topics before it leaves old ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from ftis_node.gossip.types import GossipCounters, GossipMessage

T = TypeVar("T", int, str)
Subscribe = Callable[[T], AbstractAsyncContextManager[AsyncIterator[GossipMessage]]]


class AnnouncementQueue:
    """Drop-oldest queue with one reader, within one event loop."""

    def __init__(self, *, capacity: int, counters: GossipCounters) -> None:
        self._queue: asyncio.Queue[GossipMessage | None] = asyncio.Queue(capacity + 1)  # None: closed
        self._capacity = capacity
        self._counters = counters
        self._error: BaseException | None = None
        self._has_reader = False  # the role "generator" has none: it drops all, which is no fault to report

    def put(self, announcement: GossipMessage) -> None:
        self._counters.announcements_received += 1
        if self._queue.qsize() >= self._capacity:
            self._queue.get_nowait()
            self._counters.announcements_dropped += self._has_reader
        self._queue.put_nowait(announcement)

    def close(self, error: BaseException | None = None) -> None:
        """End the reader's iteration after the queued messages; with `error`, raise it there."""
        self._error = error
        if not self._queue.full():  # else it is closed already
            self._queue.put_nowait(None)

    async def drain(self) -> AsyncIterator[GossipMessage]:
        self._has_reader = True
        while (announcement := await self._queue.get()) is not None:
            yield announcement
        self._queue.put_nowait(None)  # for the next reader
        if self._error is not None:
            raise self._error


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
