"""Memory of the node's processes, of the machine and of its GPUs, measured from outside the node."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import psutil

from ftis_node.dashboard.snapshot import GpuUsage, MachineUsage

if TYPE_CHECKING:
    from ftis_node.config.home import Home

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

    def read(self, home: Home, process: psutil.Process | None) -> MachineUsage:
        """Return the current values. `process` is the node's, None if it is not running."""
        memory = psutil.virtual_memory()
        resident = _resident_bytes(process) if process else []
        return MachineUsage(
            num_processes=len(resident),
            resident_bytes=sum(resident),
            ram_used_bytes=memory.total - memory.available,
            ram_total_bytes=memory.total,
            disk_free_bytes=_disk_free_bytes(home),
            gpus=self._gpus(),
        )

    def _gpus(self) -> tuple[GpuUsage, ...]:
        if self._nvml is None:
            return ()
        try:
            return tuple(_gpu(self._nvml, index) for index in range(self._nvml.nvmlDeviceGetCount()))
        except self._nvml.NVMLError:  # the driver was unloaded, or access is denied
            return ()


def _disk_free_bytes(home: Home) -> int:
    """Return the free disk space of the home; 0, which the screen omits, if the home no longer exists."""
    try:
        return shutil.disk_usage(home.root).free
    except OSError:
        return 0


def _resident_bytes(process: psutil.Process) -> list[int]:
    """Return the resident memory of the node and each child process, without processes that end meanwhile."""
    sizes = []
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
    for member in family:
        try:
            sizes.append(int(member.memory_info().rss))
        except psutil.Error:
            continue
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
    memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle)
    return GpuUsage(
        name=name.decode() if isinstance(name, bytes) else str(name),
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        busy=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    )
