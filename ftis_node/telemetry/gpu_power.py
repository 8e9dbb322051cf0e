"""Energy and power limit of a node's GPUs, by NVIDIA's management library. Other programs on a GPU count, too.

A GPU older than Volta, a part of a GPU (MIG) and a CPU have no counter of energy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ftis_node.install_hint import how_to_install
from ftis_node.telemetry.nvml import gpu_handle, opened_nvml, visible_names

log = logging.getLogger(__name__)

MILLIJOULES_PER_WH = 3_600_000
MILLIWATTS = 1000


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


@contextmanager
def limited_power(watts: int, gpus: Sequence[int] = ()) -> Iterator[None]:
    """Limit the power of each of the GPUs, and restore the former limits at the end. 0 changes nothing.

    Only root may change a limit. If this fails, one warning says why, and the node runs without it.
    """
    nvml = opened_nvml() if watts else None
    handles = _handles(nvml, gpus)
    if watts and not handles:
        log.warning(
            "limits.gpu_watts: no GPU can be limited here (%s). Type: sudo nvidia-smi --power-limit=%d",
            "NVML does not name the node's GPUs" if nvml else how_to_install("gpu-figures"),
            watts,
        )
    with ExitStack() as restored:
        for gpu in handles:
            _limit(nvml, gpu, watts * MILLIWATTS, restored)
        yield


def _limit(nvml: Any, gpu: Any, milliwatts: int, restored: ExitStack) -> None:
    number = None
    try:
        number, before = nvml.nvmlDeviceGetIndex(gpu), nvml.nvmlDeviceGetPowerManagementLimit(gpu)
        lowest, highest = nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)
        if not lowest <= milliwatts <= highest:
            log.warning(
                "limits.gpu_watts is %d: GPU %d takes %d to %d, so its limit stays at %d W",
                *(milliwatts // MILLIWATTS, number, lowest // MILLIWATTS, highest // MILLIWATTS, before // MILLIWATTS),
            )
            return
        nvml.nvmlDeviceSetPowerManagementLimit(gpu, milliwatts)
    except nvml.NVMLError_NoPermission:
        command = f"sudo nvidia-smi --id={number} --power-limit={milliwatts // MILLIWATTS}"
        log.warning("limits.gpu_watts: only root may change the limit of GPU %s. Type: %s", number, command)
    except nvml.NVMLError as error:
        log.warning("limits.gpu_watts: the limit of GPU %s cannot be changed: %s", number, error)
    else:
        restored.callback(_restore, nvml, gpu, before)


def _restore(nvml: Any, gpu: Any, milliwatts: int) -> None:
    try:
        nvml.nvmlDeviceSetPowerManagementLimit(gpu, milliwatts)
    except nvml.NVMLError as error:
        log.warning("the power limit of %d W cannot be restored: %s", milliwatts // MILLIWATTS, error)


def _handles(nvml: Any, gpus: Sequence[int]) -> list[Any]:
    if nvml is None:
        return []
    try:
        return [gpu_handle(nvml, name) for name in visible_names(nvml, gpus)]
    except (nvml.NVMLError, IndexError) as error:
        log.debug("NVML finds no GPU: %s", error)
        return []
