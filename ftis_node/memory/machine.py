"""The memory of a machine as the plan sees it: each GPU's total, what the node may use of it, and the host's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftis_node.config.node import NodeSettings
from ftis_node.models.accelerators import Accelerator
from ftis_node.telemetry.terminal_text import GIB, in_gib

USABLE_SHARE = 0.95  # torch's allocator reserves more than is in use, and the driver keeps a part
SPARE_BYTES = int(0.3 * GIB)  # of the free memory: a desktop's use varies
NO_USE_BYTES = GIB // 4  # of other programs: the driver's own, which `USABLE_SHARE` covers


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or `number` equal ones that count as one: memory of each, in bytes.

    `taken_bytes` is what other programs use, `limit_bytes` the setting `memory.limit_gib`, None without.
    """

    memory_bytes: int
    taken_bytes: int = 0
    limit_bytes: int | None = None
    name: str = ""
    number: int = 1

    @classmethod
    def of(cls, found: Accelerator) -> Card:
        taken = 0 if found.free_bytes is None else found.memory_bytes - found.free_bytes
        return cls(found.memory_bytes, taken if taken > NO_USE_BYTES else 0, name=found.name)

    @property
    def total_bytes(self) -> int:
        return self.number * self.memory_bytes

    @property
    def usable_bytes(self) -> int:
        """Return what the node's workers may use together."""
        free = self.memory_bytes - self.taken_bytes - SPARE_BYTES if self.taken_bytes else self.memory_bytes
        limit = self.memory_bytes if self.limit_bytes is None else self.limit_bytes
        return self.number * max(0, min(int(USABLE_SHARE * self.memory_bytes), free, limit))

    @property
    def bound(self) -> str:
        """Return why less than usual is usable, as the end of a sentence; "" if nothing bounds it."""
        if self.usable_bytes == self.number * (self.limit_bytes or 0):
            return f" (memory.limit_gib; the GPU has {in_gib(self.memory_bytes)})"
        if self.taken_bytes:
            return f" (other programs use {in_gib(self.taken_bytes)} of the GPU's {in_gib(self.memory_bytes)})"
        return ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of a machine, its free host memory, and the free part of /dev/shm.

    Host memory and /dev/shm count on the CPU alone.
    """

    cards: tuple[Card, ...]
    host_bytes: int
    memory_disk_bytes: int = 0

    def limited_by(self, settings: NodeSettings) -> Machine:
        """Return the machine with `memory.limit_gib` of the settings on each card."""
        gib = settings.memory.limit_gib
        if gib is None:
            return self
        return replace(self, cards=tuple(replace(card, limit_bytes=int(gib * GIB)) for card in self.cards))


def cards_of(*sizes_bytes: int) -> tuple[Card, ...]:
    """Return cards of these sizes, whose memory is all free."""
    return tuple(map(Card, sizes_bytes))
