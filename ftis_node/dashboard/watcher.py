"""Poller of a node's snapshots, with everything that the dashboard shows. Blocking; runs in one thread.

Each snapshot begins with the lock of the home, so it also finds a node that was restarted.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import psutil

from ftis_node.config.home import Home
from ftis_node.config.home_files import start_command
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document, read_status
from ftis_node.telemetry.history import HistoryReader
from ftis_node.telemetry.nvml import busy_share, opened_nvml
from ftis_node.telemetry.status import Status
from ftis_node.view.snapshot import GpuUsage, MachineUsage, NodeSnapshot

NUM_EVENTS = 1000  # of all events, and as many notable ones


class Watcher:
    """Poller of one node. `poll` takes about as long as the node's port needs to reply."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._reader = HistoryReader(home.events, num_last_events=NUM_EVENTS)
        self._status = Status()
        self._peers: tuple[dict[str, Any], ...] = ()

    def poll(self, *, with_history: bool = True) -> NodeSnapshot:
        """Return the current state. If the documents cannot be read, it has the last ones and the problem.

        The first snapshot of a long event log takes seconds; `with_history=False` skips it.
        """
        problem, is_held = "", False
        try:
            is_held = self._home.is_held()
            self._status, self._peers = read_status(self._home), tuple(read_document(self._home, "/peers"))
        except (FtisError, OSError, ValueError, TypeError) as error:  # also a damaged document, or a read-only home
            problem = str(error)
        if with_history:
            self._reader.poll()
        return NodeSnapshot(
            taken_at=time.time(),
            status=self._status,
            is_silent=is_held and bool(problem),
            peers=self._peers,
            history=self._reader.history,
            machine=read_machine(self._home if is_held else None),
            start_command=self._status.node.resume or start_command(self._home),
            logs=str(self._home.logs),
            problem=problem,
        )


def read_machine(home: Home | None) -> MachineUsage:
    """Return the memory of the machine, of its GPUs, and of the processes of the node that holds `home`.

    A node in another container counts without processes.
    """
    memory = psutil.virtual_memory()
    resident = [] if home is None else _resident_bytes(home)
    return MachineUsage(
        num_processes=len(resident),
        resident_bytes=sum(resident),
        ram_used_bytes=memory.total - memory.available,
        ram_total_bytes=memory.total,
        gpus=_gpus(),
    )


def _resident_bytes(home: Home) -> list[int]:
    sizes: list[int] = []
    with suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(home.lock.read_text().split("\n", 1)[0]))
        for member in (process, *process.children(recursive=True)) if home.is_opened_by(process.pid) else ():
            with suppress(psutil.Error):
                sizes.append(int(member.memory_info().rss))
    return sizes


def _gpus() -> tuple[GpuUsage, ...]:
    if (nvml := opened_nvml()) is None:
        return ()
    try:
        return tuple(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError:  # the driver was unloaded, or access is denied
        return ()


def _gpu(nvml: Any, handle: Any) -> GpuUsage:
    memory, watts = nvml.nvmlDeviceGetMemoryInfo(handle), None
    with suppress(nvml.NVMLError_NotSupported):
        watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return GpuUsage(
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        busy=busy_share(nvml, handle),
        watts=watts,
    )
