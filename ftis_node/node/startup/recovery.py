"""What a node sets right in its home by itself, before it starts: nothing of it needs a person.

    lines that are no events          left out; the trail as it was is kept in damaged/     `saved` in the trail
    a database that is damaged        moved to damaged/, what can be read of it saved       `saved`
    a group that is not what it was   released unused                                       `released`, damaged
    a buffer behind the event trail   what steps have used is used; numbering goes on       `buffer_rolled_back`
    checkpoints ahead of the trail    it goes on after them, and says so                    `steps_unknown`

What is lost so is fetched again from peers while it is fresh, as after any absence.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ftis_node.node.peers.store import copy_peers
from ftis_node.node.startup.trail_repair import repair_event_log
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.salvage import copy_buffer, missing_columns
from ftis_node.replay.soundness import rescue
from ftis_node.telemetry.events import EventLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.config.home import Home
    from ftis_node.learner.messages import LearnerState
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.telemetry.trail_summary import EventLogSummary

log = logging.getLogger(__name__)


def rescue_files(home: Home) -> None:
    """Move damaged databases and trails aside, and save what can be read. The caller holds the home's lock.

    Raise OSError and sqlite3.Error for disk errors, MachineError if another program holds one of the files.
    """
    if num_lines := repair_event_log(home.events, home.damaged):
        log.warning("%d lines of the event trail were damaged: it is as it was in %s", num_lines, home.damaged)
        _log_recovery(
            home, file=home.events.name, why="lines that are no events", num_lost=num_lines, folder=str(home.damaged)
        )
    for path, copy, look, what in (
        (home.replay, copy_buffer, missing_columns, "groups"),
        (home.peers, copy_peers, lambda _: "", "peers"),
    ):
        rescued = rescue(path, home.damaged, copy=copy, look=look)
        if rescued is None:
            continue
        saved = f"{rescued.num_rows} of its {what} are saved, the file as it was is in {rescued.folder}"
        log.warning("%s was damaged (%s): %s", rescued.name, rescued.why, saved)
        _log_recovery(home, file=rescued.name, why=rescued.why, num_saved=rescued.num_rows, folder=str(rescued.folder))


def _log_recovery(home: Home, **fields: str | int) -> None:
    trail = EventLog(home.events)
    trail.write("recovered", **fields)
    trail.close()


def recover_buffer(buffer: ReplayBuffer, remembered: EventLogSummary, events: EventLog, *, peer_id: str) -> None:
    """Bring a buffer to the state of the event trail, and release groups that differ from what was stored."""
    for group_id in buffer.release_damaged():
        log.warning("group %s is not what was stored: it is released unused", group_id.hex()[:12])
        events.write("released", group=group_id, reason=ReleaseReason.DAMAGED)
    num_lost, num_used = buffer.follow_trail(
        expected=remembered.expected,
        used=remembered.used,
        in_doubt=remembered.in_doubt,
        released=remembered.released,
    )
    last_number = remembered.last_numbers.get(peer_id, 0)
    if num_lost or num_used or buffer.last_number() < last_number:
        buffer.raise_last_number(last_number)
        log.warning(
            "the replay buffer is behind the event trail: %d groups are lost (peers' fresh ones are fetched again), %d "
            "that steps have used are not used again, own groups go on with number %d",
            *(num_lost, num_used, buffer.last_number() + 1),
        )
        events.write("buffer_rolled_back", num_lost=num_lost, num_used=num_used, last_number=buffer.last_number())


def log_unknown_steps(state: LearnerState, *, done: int, holds: Callable[[bytes], object], events: EventLog) -> None:
    """Log and record that the checkpoint is of steps that the event trail does not know; change nothing.

    `done` is the trail's last step, `holds` gives None for a group that the buffer does not have. One step further is
    what a node left that ended before it wrote the step down; the buffer has that step's groups then.
    """
    groups = [bytes.fromhex(name) for name in state.last_groups or ()]
    is_next = state.step == done + 1 and (not groups or any(holds(group) is not None for group in groups))
    if state.step <= done or is_next:
        return
    log.warning(
        "the newest checkpoint is of step %d and the event trail knows %d: another home's checkpoints were put into "
        "this one, or the trail's last lines are lost; it goes on after step %d",
        *(state.step, done, state.step),
    )
    events.write("steps_unknown", step=state.step, done=done)
