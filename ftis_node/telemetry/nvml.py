"""NVIDIA's management library, if the package `nvidia-ml-py` is installed. It uses no memory of a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any


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
