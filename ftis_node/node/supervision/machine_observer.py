"""The facts about the machine that a schedule asks for: its power supply, its programs, and the users of its GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from ftis_node.config.schedule import ScheduleSection
from ftis_node.telemetry.nvml import gpu_handle, opened_nvml, visible_names

log = logging.getLogger(__name__)
SETTLE_S = 60.0  # a program that ended starts again, or a launcher starts another
GRAPHICS_BYTES = 1 << 30  # of GPU memory: a game uses more, a desktop less


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What else the machine does. `programs` are those of `schedule.while_running`, `gpu_users` other programs."""

    on_battery: bool = False
    programs: tuple[str, ...] = ()
    gpu_users: tuple[str, ...] = ()


@dataclass(eq=False, repr=False)
class MachineObserver:
    """Observer of the facts that a schedule asks for; it reads no others. A program counts until `SETTLE_S` later.

    `gpus` are the indices of the node's GPUs; empty: all that this process sees.
    """

    schedule: ScheduleSection
    clock: Callable[[], float] = time.monotonic
    gpus: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._programs, self._gpu_users = (_Recent() for _ in range(2))
        self._has_warned = False

    def facts(self) -> MachineFacts:
        """Return the facts of this moment. It takes some milliseconds."""
        schedule, now = self.schedule, self.clock()
        battery = psutil.sensors_battery() if schedule.when_on_battery == "pause" else None
        programs = running_programs() if schedule.while_running else set()
        users = self._users_of(opened_nvml()) if schedule.when_gpu_is_used == "pause" else []
        named = (name for name in schedule.while_running if name.lower() in programs)
        return MachineFacts(
            on_battery=battery is not None and battery.power_plugged is False,
            programs=self._programs.note(named, now),
            gpu_users=self._gpu_users.note(users, now),
        )

    def _users_of(self, nvml: Any) -> list[str]:
        """Return the other users of the GPUs; none if the driver does not say, for example after it was replaced."""
        if nvml is None:
            return []
        try:
            return list(other_gpu_users(nvml, self.gpus))
        except (nvml.NVMLError, IndexError) as error:
            if not self._has_warned:
                log.warning("schedule.when_gpu_is_used has no effect while the GPU's driver fails: %s", error)
            self._has_warned = True
            return []


class _Recent:
    def __init__(self) -> None:
        self._seen_at: dict[str, float] = {}

    def note(self, names: Iterable[str], now: float) -> tuple[str, ...]:
        self._seen_at |= dict.fromkeys(names, now)
        self._seen_at = {name: at for name, at in self._seen_at.items() if now - at < SETTLE_S}
        return tuple(self._seen_at)


def running_programs() -> set[str]:
    """Return the names of all processes in lower case, also without `.exe`."""
    names = {str(process.info["name"] or "").lower() for process in psutil.process_iter(["name"])}
    return names | {name.removesuffix(".exe") for name in names}


def other_gpu_users(nvml: Any, gpus: Sequence[int] = ()) -> Iterator[str]:
    """Yield the names of programs that compute on one of these GPUs, or hold much of its memory, but this node's.

    In a container NVML reports the host's process ids. A process that this machine does not show is left out. Raises
    `nvml.NVMLError`.
    """
    node = psutil.Process()
    own = {node.pid, *(child.pid for child in node.children(recursive=True))}
    for pid, num_bytes, computes in _gpu_processes(nvml, gpus):
        if pid in own or not (computes or (num_bytes or 0) >= GRAPHICS_BYTES):
            continue
        with suppress(psutil.Error):
            yield psutil.Process(pid).name()


def _gpu_processes(nvml: Any, gpus: Sequence[int]) -> Iterator[tuple[int, int | None, bool]]:
    """Yield process id, bytes of GPU memory (None: unknown) and whether it computes, for each process of each GPU."""
    kinds = ((nvml.nvmlDeviceGetComputeRunningProcesses, True), (nvml.nvmlDeviceGetGraphicsRunningProcesses, False))
    for name in visible_names(nvml, gpus):
        for list_processes, computes in kinds:
            with suppress(nvml.NVMLError_NotSupported):  # a part of a GPU (MIG)
                for process in list_processes(gpu_handle(nvml, name)):
                    yield process.pid, process.usedGpuMemory, computes
