"""State of a node at one time: what a renderer gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftis_node.telemetry.history import History
from ftis_node.telemetry.status import Status


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Usage of one GPU. `busy` is a fraction, 0 to 1. It and `watts` are None if the driver does not measure them."""

    used_bytes: int
    total_bytes: int
    busy: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class MachineUsage:
    """Memory of the node's processes and of the machine. Shared pages count in each process."""

    num_processes: int = 0
    resident_bytes: int = 0
    ram_used_bytes: int = 0
    ram_total_bytes: int = 0
    gpus: tuple[GpuUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """State of a node at `taken_at` (Unix seconds), with its status at `status.health.taken_at`.

    `is_silent` means that its process runs, but its port does not answer: the values are those of its last answer.
    `start_command` starts the node again. `problem` is one line about a document that could not be read.
    """

    taken_at: float
    status: Status
    is_silent: bool = False
    peers: tuple[dict[str, Any], ...] = ()
    history: History = History()
    machine: MachineUsage = MachineUsage()
    start_command: str = ""
    logs: str = ""
    problem: str = ""

    @property
    def state(self) -> str:
        """Return the state of the node in its status, or `silent`."""
        return "silent" if self.is_silent else self.status.node.state

    @property
    def is_live(self) -> bool:
        return self.state in ("running", "stopping")

    @property
    def has_ended(self) -> bool:
        return self.state in ("stopped", "failed")
