"""Faults of the wall clock: one node's clock moves ahead or back by minutes or hours, and is corrected later."""

import time
from functools import partial

from ftis_node.telemetry.events import EventReader
from tests.chaos.faults.base import Fault, FaultContext
from tests.chaos.faults.moved_clock import offset_file_of

MINUTES_S, HOURS_S = 60.0, 3600.0
SHORTEST_S, LONGEST_S = 5.0, 20.0
LOGGED_WITHIN_S = 240.0  # a busy machine


def move(context: FaultContext, *, unit_s: float, sign: int) -> None:
    """Move the clock. The node must log it. Undoing the fault corrects the clock."""
    offset_s = round(sign * unit_s * context.rng.uniform(1.0, 12.0))
    context.notes.append(f"by {offset_s:+d} s")
    file, before = offset_file_of(context.node.home), _num_logged(context)
    context.undoing.callback(file.write_text, "0")
    file.write_text(str(offset_s))
    is_logged = context.node.wait_for(lambda: _num_logged(context) > before, timeout_s=LOGGED_WITHIN_S)
    assert is_logged, f"the node did not log the moved clock: {context.node.last_log_line()}"
    time.sleep(context.rng.uniform(SHORTEST_S, LONGEST_S))


def _num_logged(context: FaultContext) -> int:
    """Count the events. Other faults damage lines of the log."""
    return sum(b'"clock_moved"' in line for line in EventReader(context.node.home / "events.jsonl").read_new())


AHEAD = "It logs the change and trains on own groups. Groups that seem too old are dropped as stale; no peer is banned."
BEHIND = "It logs the change and trains on own groups until its clock agrees with the peers' again. No ban gets longer."
FAULTS = (
    Fault("clock", "clock-minutes-ahead", AHEAD, partial(move, unit_s=MINUTES_S, sign=1)),
    Fault("clock", "clock-minutes-back", BEHIND, partial(move, unit_s=MINUTES_S, sign=-1)),
    Fault("clock", "clock-hours-ahead", AHEAD, partial(move, unit_s=HOURS_S, sign=1)),
    Fault("clock", "clock-hours-back", BEHIND, partial(move, unit_s=HOURS_S, sign=-1)),
)
