"""A machine as the plan sees it: its memory, the GPUs of each worker, and how new weights reach the engine.

    ipc      the engine maps the learner's own tensors (CUDA IPC)    one GPU for both, all weights trained
    pinned   a file in memory whose pages CUDA locks                 any other GPU
    file     a file in memory, or in the home                        a CPU; adapters, which are megabytes

A method that fails at run time falls back to the next one: `learner/checkpoint/publication.py` and
`generation/weight_loader.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftis_node.config.node import NodeSettings
from ftis_node.generation.engines.core_process import IS_WSL
from ftis_node.models.accelerators import Accelerator
from ftis_node.telemetry.terminal_text import GIB, in_gib
from ftis_node.workers.weight_store import Transfer

USABLE_SHARE = 0.95  # torch's allocator reserves more than is in use, and the driver keeps a part
SPARE_BYTES = int(0.3 * GIB)  # of the free memory: a desktop's use varies
# A process on a GPU: driver context, kernels and cuBLAS workspace; 0.6 to 0.8 GiB with CUDA 13 on a Hopper card. A user
# reports 0.35 to 0.45 GiB on RTX 30 and 40, which was not measured here.
DEVICE_CONTEXT_BYTES, SMALL_CONTEXT_BYTES = 717 << 20, 461 << 20
SMALL_CONTEXTS = ((8, 6), (8, 9))  # compute capabilities
NO_USE_BYTES = GIB // 4  # of other programs: the driver's own, which `USABLE_SHARE` covers


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or `number` equal ones that count as one: memory of each, in bytes.

    `taken_bytes` is what other programs use, `limit_bytes` the setting `memory.limit_gib`, None without.
    `context_bytes` is what each process of the node takes beside its tensors.
    """

    memory_bytes: int
    taken_bytes: int = 0
    limit_bytes: int | None = None
    name: str = ""
    number: int = 1
    context_bytes: int = DEVICE_CONTEXT_BYTES

    @classmethod
    def of(cls, found: Accelerator) -> Card:
        taken = 0 if found.free_bytes is None else found.memory_bytes - found.free_bytes
        context = SMALL_CONTEXT_BYTES if found.capability in SMALL_CONTEXTS else DEVICE_CONTEXT_BYTES
        return cls(found.memory_bytes, taken if taken > NO_USE_BYTES else 0, name=found.name, context_bytes=context)

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
        if self.limit_bytes is not None and self.usable_bytes == self.number * self.limit_bytes:
            return f" (memory.limit_gib; the GPU has {in_gib(self.memory_bytes)})"
        if self.taken_bytes:
            return f" (other programs use {in_gib(self.taken_bytes)} of the GPU's {in_gib(self.memory_bytes)})"
        return ""


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """The GPUs of each worker; empty without a GPU. The workers share one GPU, or have none in common."""

    generator: tuple[int, ...] = ()
    learner: tuple[int, ...] = ()

    @property
    def are_shared(self) -> bool:
        """Return whether both workers are on one device; a CPU counts as one."""
        return self.generator == self.learner

    def cards_among(self, cards: tuple[Card, ...]) -> tuple[Card, ...]:
        """Return the plan's cards, the generator's and the learner's.

        A generator on several GPUs counts as one: the smallest of them times their number, because weights and cache
        are divided evenly. Each of the learner's GPUs counts as the smallest of them.
        """
        of_generator, of_learner = (
            min((cards[gpu] for gpu in gpus), key=lambda card: card.usable_bytes, default=None)
            for gpus in (self.generator, self.learner)
        )
        if of_generator is None or of_learner is None:
            return ()
        return (of_learner,) if self.are_shared else (replace(of_generator, number=len(self.generator)), of_learner)

    def __str__(self) -> str:
        generator, learner = (
            " and ".join(", ".join(map(str, gpus)).rsplit(", ", 1)) for gpus in (self.generator, self.learner)
        )
        return f"the generator on GPU {generator}, the learner on GPU {learner}"


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of a machine, its free host memory, and the free part of /dev/shm.

    Host memory counts on the CPU, for offloaded states and for an engine that sleeps; /dev/shm on the CPU alone.
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


def transfer_of(settings: NodeSettings, *, on_gpu: bool, shares_gpu: bool, serves_adapters: bool) -> Transfer:
    """Return the fastest method that can work for these settings on this machine.

    `shares_gpu`: both workers are on one GPU. An adapter that is not served is merged on its way, tensor by tensor, so
    there is nothing to map. No rank of a learner of several ranks holds whole tensors. WSL has no CUDA IPC.
    """
    if not on_gpu or serves_adapters:
        return "file"
    is_whole = not settings.lora and settings.learner.num_ranks == 1
    return "ipc" if shares_gpu and is_whole and not IS_WSL else "pinned"
