"""NVIDIA's management library, if the package `nvidia-ml-py` is installed, and the energy of a node's GPUs by it.

It uses no memory of a GPU. A GPU older than Volta, a part of a GPU (MIG) and a CPU have no counter of energy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
MILLIJOULES_PER_WH = 3_600_000


@cache
def opened_nvml() -> Any:
    """Return the module `pynvml`, initialized; None without the package or a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def visible_names(nvml: Any, gpus: Sequence[int] = ()) -> list[str]:
    """Return an index or UUID of each GPU that CUDA sees here, or of those with these indices among them.

    Raises IndexError if there are fewer.
    """
    seen = os.environ.get(VISIBLE_GPUS)
    names = list(map(str, range(nvml.nvmlDeviceGetCount()))) if seen is None else seen.replace(" ", "").split(",")
    return [names[gpu] for gpu in gpus] if gpus else [name for name in names if name]


def gpu_handle(nvml: Any, name: str) -> Any:
    """Return NVML's handle of a GPU with this index or UUID. Raises NVMLError."""
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)


def busy_share(nvml: Any, handle: Any) -> float | None:
    """Return the share of time in which the GPU worked, 0 to 1; None for a part of a GPU (MIG). Raises NVMLError."""
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    except nvml.NVMLError_NotSupported:
        return None


class EnergyMeter:
    """Meter of the energy that the GPUs with these indices use, other programs too; without indices, all in sight."""

    def __init__(self, gpus: Sequence[int] = (), *, is_used: bool = True) -> None:
        self._nvml: Any = opened_nvml() if is_used else None
        self._gpus = _handles(self._nvml, gpus)
        self._before = self._total()

    def take_wh(self) -> float | None:
        """Return the watt-hours since the last call, or since the meter was made. None if the GPUs do not count."""
        before, self._before = self._before, self._total()
        if before is None or self._before is None or self._before < before:  # the driver was loaded again
            return None
        return (self._before - before) / MILLIJOULES_PER_WH

    def _total(self) -> int | None:
        """Return the millijoules of all GPUs since the driver was loaded."""
        if not self._gpus:
            return None
        try:
            return sum(int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) for gpu in self._gpus)
        except self._nvml.NVMLError:
            return None


def _handles(nvml: Any, gpus: Sequence[int]) -> list[Any]:
    if nvml is None:
        return []
    try:
        return [gpu_handle(nvml, name) for name in visible_names(nvml, gpus)]
    except (nvml.NVMLError, IndexError) as error:
        log.debug("NVML finds no GPU: %s", error)
        return []
