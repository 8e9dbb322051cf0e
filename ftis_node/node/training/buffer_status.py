"""The status sections for the buffer and the used part of the token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.replay.reader import ReplayReader
from ftis_node.telemetry.status import BudgetStatus, ReplayStatus, amount

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.node.context import NodeContext
    from ftis_node.node.supervision.disk_thread import DiskThread
    from ftis_node.node.training.slots import SlotPool
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
