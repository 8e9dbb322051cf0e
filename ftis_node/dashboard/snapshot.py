"""State of a node at one moment, as a frozen record with everything that the dashboard shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ftis_node.telemetry.history import History

if TYPE_CHECKING:
    from ftis_node.telemetry.status import Status


class NodePhase(StrEnum):
    """State of the node's process."""

    RUNNING = "running"
    STARTING = "starting"  # the process runs and loads models; its status port is not open yet
    SILENT = "silent"  # the process runs, but its port does not answer
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Usage of one GPU. `busy` is a fraction, 0 to 1."""

    used_bytes: int
    total_bytes: int
    busy: float


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
    """State of a node at `taken_at` (Unix seconds). `reported_at` is the time of the node's last status.

    `start_command` starts the node again. `problem` is one line about a document that could not be read.
    """

    taken_at: float
    phase: NodePhase
    status: Status
    reported_at: float = 0.0
    peers: tuple[dict[str, Any], ...] = ()
    history: History = History()
    machine: MachineUsage = MachineUsage()
    start_command: str = ""
    logs: str = ""
    problem: str = ""

    @property
    def is_live(self) -> bool:
        """Return whether the values are current."""
        return self.phase is NodePhase.RUNNING
