"""Repeated snapshot of a node, from its local port or from the files in its home. Blocking; runs in one thread.

    lock file names a running process --no--> STOPPED        values of status.json
                  | yes
    it has published its port ---------no--> STARTING
                  | yes
    the port answers ------------------no--> SILENT          its last values
                  | yes
                  `------------------------> RUNNING

Each snapshot starts from the lock file, so it also finds a node that was restarted. Only the last values are kept.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from ftis_node.config.home_files import start_command
from ftis_node.dashboard.snapshot import GpuUsage, MachineUsage, NodePhase, NodeSnapshot
from ftis_node.dashboard.view.events import is_notable
from ftis_node.errors import FtisError
from ftis_node.telemetry.history import HistoryFollower
from ftis_node.telemetry.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.config.home import Home

NUM_EVENTS = 1000  # of all events, and as many notable ones
CLOCK_SLACK_S = 2.0


def running_process(home: Home) -> psutil.Process | None:
    """Return the process that the home's lock file names; None if it has ended or another process has its id.

    The function does not acquire the lock, because a node that starts at that moment would find it taken.
    """
    try:
        written_at = home.lock.stat().st_mtime
        process = psutil.Process(int(home.lock.read_text().split("\n", 1)[0]))
        is_it = process.create_time() <= written_at + CLOCK_SLACK_S
        return process if is_it and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, psutil.Error):
        return None


class MachineMeter:
    """Repeated measurement of memory and GPUs. NVML is opened once, if nvidia-ml-py is installed."""

    def __init__(self) -> None:
        self._nvml = _open_nvml()

    def read(self, process: psutil.Process | None) -> MachineUsage:
        memory = psutil.virtual_memory()
        resident = _resident_bytes(process) if process else []
        return MachineUsage(
            num_processes=len(resident),
            resident_bytes=sum(resident),
            ram_used_bytes=memory.total - memory.available,
            ram_total_bytes=memory.total,
            gpus=self._gpus(),
        )

    def _gpus(self) -> tuple[GpuUsage, ...]:
        if self._nvml is None:
            return ()
        try:
            return tuple(_gpu(self._nvml, index) for index in range(self._nvml.nvmlDeviceGetCount()))
        except self._nvml.NVMLError:  # the driver was unloaded, or access is denied
            return ()


def _resident_bytes(process: psutil.Process) -> list[int]:
    """Return the resident memory of the node and each child process, without processes that end meanwhile."""
    sizes: list[int] = []
    with suppress(psutil.Error):
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                sizes.append(int(member.memory_info().rss))
    return sizes


def _open_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # this machine has no driver
        return None
    return pynvml


def _gpu(nvml: Any, index: int) -> GpuUsage:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuUsage(
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        busy=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    )


class Watcher:
    """Poller of one node. `poll` takes about as long as the node's port needs to reply."""

    def __init__(self, home: Home, read: Callable[[Home, str], Any]) -> None:
        """`read` returns `/status` or `/peers` of a running or stopped node, or raises FtisError if there is none."""
        self._home = home
        self._read = read
        self._follower = HistoryFollower(home.events, num_last_events=NUM_EVENTS, is_notable=is_notable)
        self._meter = MachineMeter()
        self._last: tuple[Status, tuple[dict[str, Any], ...], float] = (Status(), (), 0.0)

    def poll(self, *, with_history: bool = True) -> NodeSnapshot:
        """Return the current state.

        The first snapshot of a long event log takes seconds; `with_history=False` skips it.
        """
        process = running_process(self._home)
        phase, problem = NodePhase.STOPPED, ""
        if process is not None:
            phase = NodePhase.RUNNING if self._home.running_url() else NodePhase.STARTING
        if phase is not NodePhase.STARTING:
            phase, problem = self._ask(phase)
        if with_history:
            self._follower.poll()
        status, peers, reported_at = self._last
        return NodeSnapshot(
            taken_at=time.time(),
            phase=phase,
            status=status,
            reported_at=reported_at,
            peers=peers,
            history=self._follower.history,
            machine=self._meter.read(process),
            start_command=status.node.resume or start_command(self._home),
            logs=str(self._home.logs),
            problem=problem,
        )

    def _ask(self, phase: NodePhase) -> tuple[NodePhase, str]:
        """Read the documents and return the phase and the problem. If reading fails, the last documents remain."""
        try:
            status = msgspec.convert(self._read(self._home, "/status"), Status)
            peers = tuple(self._read(self._home, "/peers"))
        except (FtisError, OSError, ValueError) as error:  # ValueError: a half-written or damaged document
            return (NodePhase.SILENT if phase is NodePhase.RUNNING else phase), str(error)
        reported_at = time.time() if phase is NodePhase.RUNNING else self._home.status.stat().st_mtime
        self._last = (status, peers, reported_at)
        return phase, ""
