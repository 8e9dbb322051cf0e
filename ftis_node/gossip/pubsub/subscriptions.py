"""Which of the run's topics are read, over one life of p2pd after the other.

A change takes hold without loss: a new shard is subscribed to before an old one is given up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection
    from contextlib import AbstractAsyncContextManager

    from ftis_node.gossip.interface import GossipMessage

    Subscribe = Callable[[int], AbstractAsyncContextManager[AsyncIterator[GossipMessage]]]


class Subscriptions:
    """The chosen shards, and the tasks that read them."""

    def __init__(self, shards: Collection[int], *, on_message: Callable[[int, GossipMessage], None]) -> None:
        """`on_message` gets each message of shard."""
        self._chosen = frozenset(shards)
        self._on_message = on_message
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._is_following = False

    async def choose(self, shards: Collection[int]) -> None:
        """Reads these from now on; returns when that is so, or at once where p2pd is down: then from its next start."""
        if frozenset(shards) != self._chosen:
            self._chosen = frozenset(shards)
            self._settled.clear()
            self._changed.set()
        if self._is_following:
            await self._settled.wait()

    async def settled(self) -> None:
        """Returns when what is chosen is read."""
        await self._settled.wait()

    async def follow(self, subscribe: Subscribe) -> None:
        """Reads what is chosen, until cancelled. Raises OSError or EOFError in a group where p2pd is lost."""
        reading: dict[int, asyncio.Task[None]] = {}
        self._settled.clear()
        self._is_following = True
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._changed.clear()
                    chosen = self._chosen
                    for shard in sorted(chosen - set(reading)):
                        subscribed = asyncio.Event()
                        reading[shard] = group.create_task(self._read(subscribe, shard, subscribed))
                        await subscribed.wait()
                    for shard in set(reading) - chosen:
                        reading.pop(shard).cancel()
                    if chosen == self._chosen:
                        self._settled.set()
                        await self._changed.wait()
        finally:
            self._is_following = False
            self._settled.set()  # nobody waits for what will not come

    async def _read(self, subscribe: Subscribe, shard: int, subscribed: asyncio.Event) -> None:
        async with subscribe(shard) as messages:
            subscribed.set()
            async for message in messages:
                self._on_message(shard, message)
