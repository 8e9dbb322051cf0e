"""The store of a node: its home with the replay buffer, the thread that writes there, and the bounds of the buffer.

Each start of a node begins an epoch of its sequence numbers, so that no number is used twice. The epoch is the Unix
time in seconds, or the last epoch plus one if that is larger. The last epoch is in the buffer and in the marker of the
home, and the larger one counts. So numbers stay unique if the buffer is deleted, damaged or restored from an old copy,
or if the clock is set back. A home from a backup has a later time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from ftis_node.config.home import Home
from ftis_node.config.home_files import mark, marked_epoch
from ftis_node.config.limits import MAX_KEPT_GROUPS, MAX_READY_BYTES, MAX_READY_GROUPS
from ftis_node.node.context import NodeContext
from ftis_node.node.storage.disk_space import DiskSpace
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.group_choice import Candidate, Freshness
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from ftis_node.swarm.rate_limits import ShareCap
from ftis_node.swarm.sequence import epoch_base, epoch_of
from ftis_node.validation.rules import MAX_CLOCK_SKEW_S

P = ParamSpec("P")
R = TypeVar("R")


class DiskThread:
    """Single-thread executor that runs calls in the order of submission.

    With `space`, a call that a full disk refuses is repeated until there is space. Later calls do not wait for it.
    """

    def __init__(self, space: DiskSpace | None = None) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self._space = space

    async def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function` in the thread and return its result. It changes nothing if it raises."""
        call = partial(self.once, function, *args, **kwargs)
        return await (call() if self._space is None else self._space.retried(call))

    async def once(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the same, and raise the error of a full disk."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))

    def close(self) -> None:
        self._thread.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class Store:
    """The replay buffer with its reader. The releases by its own methods are in the event log.

    `disk` runs the calls of `buffer` in order. `reader` reads from the event loop.
    """

    context: NodeContext
    home: Home
    buffer: ReplayBuffer
    reader: ReplayReader
    disk: DiskThread
    space: DiskSpace = field(default_factory=DiskSpace)

    async def enforce_bounds(self, cap: ShareCap) -> None:
        _, foreign_ready = self.reader.ready_counts()
        if foreign_ready > MAX_READY_GROUPS or self.reader.ready_foreign_bytes() > MAX_READY_BYTES:
            await self.evict_foreign(cap)
        num_kept, kept_bytes = self.reader.kept()
        if num_kept > MAX_KEPT_GROUPS or kept_bytes > self.context.settings.buffer.max_disk_bytes:
            await self.prune()

    async def evict_foreign(self, cap: ShareCap) -> None:
        """Release foreign groups beyond the buffer's bounds, and those of a peer beyond its share."""
        evict, keep = self.buffer.evict_foreign, {"keep": MAX_READY_GROUPS, "keep_bytes": MAX_READY_BYTES}
        for group in await self.disk(evict, **keep, cap=cap):
            self._write_released(group.id, ReleaseReason.EVICTED)

    async def release_stale(self) -> list[Candidate]:
        """Release and return the READY groups that are too old, by the run's limits of age and version."""
        step = self.context.manifest.step
        freshness = Freshness(
            now=time.time(),
            max_age_s=step.max_age_s,
            policy_version=self.context.state.policy_version,
            max_version_lag=self.context.state.version_lag(step.max_version_lag),
            peer_id=self.context.peer_id,
            max_ahead_s=math.inf if self.context.settings.learns else MAX_CLOCK_SKEW_S,  # else only peers use them
        )
        stale = await self.disk(self.buffer.release_stale, freshness)
        for group in stale:
            self._write_released(group.id, ReleaseReason.STALE)
        return stale

    async def release_ready(self, group_id: bytes, reason: ReleaseReason) -> None:
        """Release a group unused, if it is READY."""
        if await self.disk(self.buffer.release_ready, group_id, reason):
            self._write_released(group_id, reason)

    async def prune(self) -> None:
        """Delete released groups beyond the disk bound, oldest first; keep the groups of steps after the checkpoint."""
        max_disk_bytes, saved_step = self.context.settings.buffer.max_disk_bytes, self.context.state.saved_step
        await self.disk(self.buffer.prune, max_disk_bytes=max_disk_bytes, saved_step=saved_step)

    def _write_released(self, group_id: bytes, reason: ReleaseReason) -> None:
        self.context.events.write("released", group=group_id, reason=reason)


def begin_epoch(home: Home, buffer: ReplayBuffer) -> int:
    """Begin an epoch, which is on the disk when this returns. Return the number before that of its first group.

    The buffer has it first: a buffer with an older epoch than the marker is a copy from before the last start.
    Raises OSError and sqlite3.Error.
    """
    epoch = max(int(time.time()), marked_epoch(home) + 1, epoch_of(buffer.last_number()) + 1)
    buffer.raise_last_number(epoch_base(epoch))
    mark(home, epoch=epoch)
    return epoch_base(epoch)
