"""The deliver loop: a generator's own groups are done with when a peer has them, and their slots are free again.

consumes: confirmations of peers     produces: freed slots
waits for: a confirmation; age       unblocked by: a learner that pulls, time

It stands where the train loop stands in a node that learns. Learners pull what they will use, so a generator makes as
much as is pulled, and runs ahead of that by its slots; what nobody wants grows stale and makes room in the end.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.replay.lifecycle import Freshness, ReleaseReason

if TYPE_CHECKING:
    from ftis_node.node.context import Parts

LOOK_S = 0.2


class DeliverLoop:
    """Looks at what was confirmed a few times a second."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._release()
            with waiting_for("the clock"):
                await asyncio.sleep(LOOK_S)

    async def _release(self) -> None:
        parts = self._parts
        step = parts.manifest.step
        freshness = Freshness(
            now=time.time(),
            max_age_s=step.max_age_s,
            policy_version=parts.state.policy_version,
            max_version_lag=step.max_version_lag,
        )
        delivered = await parts.disk(parts.buffer.release_delivered, parts.confirmations.confirmed_ids.keys())
        stale = await parts.disk(parts.buffer.release_stale, freshness)
        for groups, reason in ((delivered, ReleaseReason.DELIVERED), (stale, ReleaseReason.STALE)):
            for group in groups:
                parts.events.write("released", group=group.id, reason=reason)
        if delivered or stale:
            await parts.disk(parts.buffer.prune, max_disk_bytes=parts.settings.buffer.max_disk_bytes)
            parts.slots.hold(parts.reader.own_held())
