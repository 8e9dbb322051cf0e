"""Memory and load of the first GPU, or of processes. Imports no torch, which would use memory of the GPU."""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil

from ftis_node.telemetry.nvml import VISIBLE_GPUS, busy_share, gpu_handle, opened_nvml
from ftis_node.telemetry.terminal_text import GIB, MIB

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 1.0
DRIVER_TIMEOUT_S = 8.0


class DeviceUse(NamedTuple):
    """Bytes in use and the busy share, between 0 and 1, or None where the driver does not measure it."""

    used_bytes: int
    busy: float | None


def read_gpu() -> DeviceUse:
    """Return the use of the first GPU by NVML, or by a process of nvidia-smi. Both take no memory of the GPU."""
    if (nvml := opened_nvml()) is None:
        used, busy = ask_driver("memory.used,utilization.gpu").split(",")
        return DeviceUse(int(used) * MIB, None if "N/A" in busy else float(busy) / 100)
    gpu = gpu_handle(nvml, first_gpu())
    return DeviceUse(nvml.nvmlDeviceGetMemoryInfo(gpu).used, busy_share(nvml, gpu))


def mean_busy(uses: Sequence[DeviceUse]) -> float | None:
    """Return the mean of the shares that were measured."""
    measured = [use.busy for use in uses if use.busy is not None]
    return round(statistics.mean(measured), 3) if measured else None


def read_processes(pids: list[int]) -> DeviceUse:
    """Return the resident memory of processes, and the load of the machine."""
    total = 0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return DeviceUse(total, psutil.cpu_percent() / 100)


@contextmanager
def sampled(read: Callable[[], DeviceUse]) -> Iterator[list[tuple[float, DeviceUse]]]:
    """Yield a list to which a thread adds the monotonic time and the use once a second."""
    samples: list[tuple[float, DeviceUse]] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(SAMPLE_EVERY_S):
            try:
                samples.append((time.monotonic(), read()))
            except Exception as error:  # a busy driver, or a figure that a part of a GPU lacks
                log.warning("a sample of the memory in use is missing: %s", error)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield samples
    finally:
        is_over.set()
        watching.join()


def ask_driver(field: str) -> str:
    """Return a field of the first GPU by nvidia-smi. Raises OSError or SubprocessError."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", f"--id={first_gpu()}"]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=DRIVER_TIMEOUT_S).stdout.strip()


def first_gpu() -> str:
    """Return the index or UUID of the first GPU that CUDA sees here."""
    return os.environ.get(VISIBLE_GPUS, "").split(",")[0].strip() or "0"


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)
