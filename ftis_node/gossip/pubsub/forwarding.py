"""Forwarding of announcements by a bootstrap node, for runs of which it is not a member.

Two members behind home routers can often reach each other only through a relay, and gossipsub does not use relays. Both
reach the bootstrap node. It subscribes to their topics and so becomes part of the gossipsub mesh. Bodies go through the
relay. The bootstrap node learns the runs from the part of the directory that it stores.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from ftis_node.gossip.wire_names import topic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftis_node.gossip.directory.validators import StoredRun
    from ftis_node.gossip.p2pd.session import Session

logger = logging.getLogger(__name__)

MAX_TOPICS = 256


class TopicForwarder:
    """Forwarder that subscribes to the topics of runs in the local part of the directory, and discards messages."""

    def __init__(self, session: Session, *, poll_interval_s: float) -> None:
        self._session = session
        self._poll_interval_s = poll_interval_s
        self._reading: dict[str, asyncio.Task[None]] = {}  # by topic

    async def run(self) -> None:
        """Run until canceled. Raises OSError or EOFError in a group if p2pd is lost."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._follow(self._session.directory.stored_runs(), group)
                await asyncio.sleep(self._poll_interval_s)

    def _follow(self, runs: Mapping[str, StoredRun], group: asyncio.TaskGroup) -> None:
        """Forward the topics of the first runs in the order given."""
        of_runs = (topic(run_id, shard) for run_id, run in runs.items() for shard in range(run.num_shards))
        topics = list(itertools.islice(of_runs, MAX_TOPICS))
        for name in set(self._reading) - set(topics):
            self._reading.pop(name).cancel()
        for name in topics:
            if name in self._reading:
                continue
            logger.info("forwarding announcements of %s", name)
            self._reading[name] = group.create_task(self._read(name), name=f"forward {name}")

    async def _read(self, name: str) -> None:
        async with self._session.client.subscribe(name) as messages:
            async for _ in messages:
                pass
