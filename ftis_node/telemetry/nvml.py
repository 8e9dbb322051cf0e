"""NVIDIA's management library, if the package `nvidia-ml-py` is installed. It uses no memory of a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


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
