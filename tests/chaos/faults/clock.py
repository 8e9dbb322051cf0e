"""The wall clock of one node is moved, forth and back, by minutes and by hours, and after a while set right again."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from tests.chaos.faults.base import Fault
from tests.chaos.faults.moved_clock import offset_file_of

if TYPE_CHECKING:
    from tests.chaos.scene import Scene

MINUTES_S, HOURS_S = 60.0, 3600.0
SHORTEST_S, LONGEST_S = 5.0, 20.0
NOTED_WITHIN_S = 60.0
SHOWN_BY = "tests/node/startup/test_recovery.py::test_the_steady_clock_does_not_jump_and_reports_a_jump_once"


def move(scene: Scene, *, unit_s: float, sign: int) -> None:
    """Moves the clock; the node must say so. It is set right when the fault is over."""
    offset_s = round(sign * unit_s * scene.rng.uniform(1.0, 12.0))
    scene.note(f"by {offset_s:+d} s")
    file, before = offset_file_of(scene.node.home), _num_noted(scene)
    scene.undo(lambda: file.write_text("0"))
    file.write_text(str(offset_s))
    noted = scene.node.wait_for(lambda: _num_noted(scene) > before, timeout_s=NOTED_WITHIN_S)
    assert noted, f"no word of the moved clock: {scene.node.last_words()}"
    time.sleep(scene.rng.uniform(SHORTEST_S, LONGEST_S))


def _num_noted(scene: Scene) -> int:
    return len(scene.node.process.events("clock_moved"))


def _fault(name: str, promise: str, *, unit_s: float, sign: int) -> Fault:
    return Fault(name, "clock", promise, SHOWN_BY, partial(move, unit_s=unit_s, sign=sign))


AHEAD = "It says so, and goes on with own groups; what is too old by the moved clock is let go as stale, nobody banned."
BEHIND = "It says so, and goes on with own groups until its clock agrees with the peers' again; no ban grows longer."
FAULTS = (
    _fault("clock-minutes-ahead", AHEAD, unit_s=MINUTES_S, sign=1),
    _fault("clock-minutes-back", BEHIND, unit_s=MINUTES_S, sign=-1),
    _fault("clock-hours-ahead", AHEAD, unit_s=HOURS_S, sign=1),
    _fault("clock-hours-back", BEHIND, unit_s=HOURS_S, sign=-1),
)
