"""The decision whether a node computes or pauses: a pure function of the settings, the last command, time and facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftis_node.config.schedule import ScheduleSection, is_within, next_start, parse_hours


@dataclass(frozen=True, slots=True)
class Command:
    """The operator's last command. `run` overrides the schedule; "" leaves the decision to it.

    It ends at the Unix time `until`; None: never.
    """

    action: Literal["", "pause", "run"] = ""
    until: float | None = None

    def at(self, now: float) -> Literal["", "pause", "run"]:
        return self.action if self.until is None or now < self.until else ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What else the machine does. `programs` are those of `schedule.while_running`, `gpu_users` other programs."""

    on_battery: bool = False
    programs: tuple[str, ...] = ()
    gpu_users: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Run, or pause for a `reason` until a Unix time; None: the end is unknown."""

    reason: str = ""
    until: float | None = None

    @property
    def is_pause(self) -> bool:
        return bool(self.reason)


RUN = Decision()


def decide(schedule: ScheduleSection, command: Command, facts: MachineFacts, *, now: float) -> Decision:
    """Return the decision at the Unix time `now`. A command comes before the schedule."""
    ranges = parse_hours(schedule.hours)
    match command.at(now):
        case "run":
            return RUN
        case "pause":
            until = command.until
            if until is not None and ranges and not is_within(ranges, until):
                until = next_start(ranges, until)
            return Decision("by command", until)
    if ranges and not is_within(ranges, now):
        return Decision(f"outside schedule.hours {schedule.hours}", next_start(ranges, now))
    if facts.on_battery and schedule.when_on_battery == "pause":
        return Decision("the machine runs on its battery")
    if facts.programs:
        return Decision(f"{', '.join(facts.programs)} is running")
    if facts.gpu_users and schedule.when_gpu_is_used == "pause":
        return Decision(f"{', '.join(facts.gpu_users)} uses the GPU")
    return RUN
