"""Bounds of the replay buffer: evicts foreign groups beyond the bounds, and deletes released groups from the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from ftis_node.telemetry.status import BudgetStatus, ReplayStatus, amount

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.node.context import NodeContext
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.supervision.background import DiskThread
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.replay.reader import BufferFigures


class BufferReporter:
    """Builds the sections from the buffer in the file `replay`."""

    def __init__(
        self, *, context: NodeContext, replay: Path, reader: ReplayReader, disk: DiskThread, slots: SlotPool
    ) -> None:
        self._context = context
        self._replay = replay
        self._reader = reader
        self._disk = disk
        self._slots = slots

    async def counts(self) -> BufferFigures:
        """Count over the whole buffer. This is slow, so it runs in the disk thread, on a separate connection."""
        return await self._disk(self._count)

    def _count(self) -> BufferFigures:
        reader = ReplayReader(self._replay)
        try:
            return reader.figures()
        finally:
            reader.close()

    def status(self, counts: BufferFigures) -> ReplayStatus:
        """Return the buffer's section."""
        return ReplayStatus(
            waiting=self._slots.waiting,
            ready=counts.ready,
            taken=counts.taken,
            released=counts.released,
            tokens=counts.tokens,
            disk_bytes=counts.disk_bytes,
        )

    def budget(self, counts: BufferFigures) -> BudgetStatus:
        """Return the budget's section."""
        limits = self._context.settings.budget
        return BudgetStatus(
            generate_tokens=amount(counts.tokens_own, limits.generate_tokens),
            learn_steps=amount(self._context.state.step, limits.learn_steps),
            learn_tokens=amount(self._reader.trained_tokens(), limits.learn_tokens),
        )


class BufferLimits:
    """Enforces the bounds of the settings section `[buffer]`, and each peer's share of the buffer."""

    def __init__(
        self, *, context: NodeContext, buffer: ReplayBuffer, reader: ReplayReader, disk: DiskThread, peers: PeerManager
    ) -> None:
        self._context = context
        self._buffer = buffer
        self._reader = reader
        self._disk = disk
        self._peers = peers

    async def enforce(self) -> None:
        """Evict and prune if a bound is exceeded."""
        limits = self._context.settings.buffer
        _, foreign_ready = self._reader.ready_counts()
        if foreign_ready > limits.max_ready_groups or self._reader.ready_foreign_bytes() > limits.max_ready_bytes:
            await self.evict_foreign()
        if self._reader.kept_bytes() > limits.max_disk_bytes:
            await self.prune()

    async def evict_foreign(self) -> None:
        """Release foreign groups beyond the buffer's bounds, and those of a peer beyond its share."""
        limits = self._context.settings.buffer
        keep = {"keep": limits.max_ready_groups, "keep_bytes": limits.max_ready_bytes}
        for group in await self._disk(self._buffer.evict_foreign, **keep, cap=self._peers.share_cap()):
            self._context.events.write("released", group=group.id, reason=ReleaseReason.EVICTED)

    async def prune(self) -> None:
        """Delete released groups beyond the disk bound, oldest first; keep the groups of steps after the checkpoint."""
        max_disk_bytes = self._context.settings.buffer.max_disk_bytes
        saved_step = self._context.state.saved_step
        await self._disk(self._buffer.prune, max_disk_bytes=max_disk_bytes, saved_step=saved_step)
