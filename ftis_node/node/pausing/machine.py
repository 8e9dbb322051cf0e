"""What else the machine does: its power supply and its programs."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from ftis_node.config.schedule import ScheduleSection
from ftis_node.node.pausing.policy import MachineFacts

SETTLE_S = 60.0  # a program that ended starts again, or a launcher starts another


class MachineObserver:
    """Observer of the facts that a schedule asks for; it reads no others. A program counts until `SETTLE_S` later."""

    def __init__(self, schedule: ScheduleSection, clock: Callable[[], float] = time.monotonic) -> None:
        self._schedule = schedule
        self._clock = clock
        self._seen_at: dict[str, float] = {}

    def facts(self) -> MachineFacts:
        """Return the facts of this moment. It takes some milliseconds."""
        schedule, now = self._schedule, self._clock()
        battery = psutil.sensors_battery() if schedule.when_on_battery == "pause" else None
        running = running_programs() if schedule.while_running else set()
        self._seen_at |= {name: now for name in schedule.while_running if name.lower() in running}
        return MachineFacts(
            on_battery=battery is not None and battery.power_plugged is False,
            programs=tuple(name for name, at in self._seen_at.items() if now - at < SETTLE_S),
        )


def running_programs() -> set[str]:
    """Return the names of all processes in lower case, also without `.exe`."""
    names = {str(process.info["name"] or "").lower() for process in psutil.process_iter(["name"])}
    return names | {name.removesuffix(".exe") for name in names}
