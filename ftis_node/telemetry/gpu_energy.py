"""Energy of a node's GPUs, by NVIDIA's management library. Other programs on a GPU count, too.

A GPU older than Volta, a part of a GPU (MIG) and a CPU have no counter of energy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ftis_node.telemetry.nvml import gpu_handle, opened_nvml, visible_names

log = logging.getLogger(__name__)

MILLIJOULES_PER_WH = 3_600_000


class EnergyMeter:
    """Meter of the energy that the GPUs with these indices use; without indices, all that this process sees."""

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
