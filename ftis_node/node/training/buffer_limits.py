"""Bounds of the replay buffer: evicts foreign groups beyond the bounds, and deletes released groups from the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.replay.lifecycle import ReleaseReason

if TYPE_CHECKING:
    from ftis_node.node.context import NodeContext
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.supervision.disk_thread import DiskThread
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.replay.reader import ReplayReader


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
