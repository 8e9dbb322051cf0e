"""Memory that a process uses of the GPU, or of the machine."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from ftis_node.lab.card.usage import first_gpu, read_gpu
from ftis_node.telemetry.nvml import gpu_handle, opened_nvml


def used_bytes(device: str, pid: int) -> int:
    """Return the bytes that process `pid` and its children use of the GPU, or their resident bytes.

    If the driver does not say which process uses what, the whole GPU counts.
    """
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    if device != "cuda":
        return sum(int(process.memory_info().rss) for process in family)
    if (nvml := opened_nvml()) is not None:
        pids = {process.pid for process in family}
        running = nvml.nvmlDeviceGetComputeRunningProcesses(gpu_handle(nvml, first_gpu()))
        if own := [each.usedGpuMemory for each in running if each.pid in pids and each.usedGpuMemory]:
            return sum(own)
    return read_gpu().used_bytes


def status_bytes(field: str) -> int:
    """Return a size from the kernel's status of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"the kernel does not report {field}"
    return 1024 * int(found[1])
