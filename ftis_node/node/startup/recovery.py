"""Recovery of a damaged home before its node starts, without the operator. The third column is the event.

    new malformed lines of the event log  stay in it; all readers skip them                   `recovered`
    a damaged `peers.sqlite`              moved to damaged/; readable rows are kept           `recovered`
    a damaged `replay.sqlite`             moved to damaged/; the buffer starts empty          `recovered`
    a buffer that lost commits            moved to damaged/; the buffer starts empty          `buffer_rolled_back`
    a group that fails its checksum       released unused                                     `released`, damaged
    checkpoints ahead of the event log    training continues after them                       `steps_unknown`

A node does not fetch lost groups of peers again, because it may have trained on them. Within minutes it has new ones.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from ftis_node.config.disk_room import disk_full, is_disk_full
from ftis_node.config.home_files import check_schema, mark_schema
from ftis_node.errors import DamagedError, MachineError
from ftis_node.node.peers.store import copy_peers
from ftis_node.node.storage.event_log_snapshot import EventLogSnapshot
from ftis_node.replay import database
from ftis_node.replay.integrity import rescue
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reset import LostCommits, find_lost_commits, missing_columns, write_empty_buffer
from ftis_node.telemetry.events import EventLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftis_node.config.home import Home
    from ftis_node.learner.messages import LearnerState
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.telemetry.event_log_summary import EventLogSummary

log = logging.getLogger(__name__)


@contextmanager
def opened(home: Home) -> Iterator[None]:
    """Hold the home's lock, after the replacement of damaged files.

    Raise HomeInUseError, ConfigError for the home of another version, MachineError for a full or broken disk.
    """
    check_schema(home)
    with suppress(DamagedError):  # refuse another version's buffer before any change; a damaged one is replaced
        if home.replay.exists():
            database.check_schema(home.replay)
    with home.owned():
        try:
            rescue_files(home)
            mark_schema(home)
        except (OSError, sqlite3.Error) as error:
            if is_disk_full(error, home.root):
                raise disk_full(home.root) from None
            raise MachineError(f"cannot open {home.root}: {error}; check its disk and start again") from None
        yield


def rescue_files(home: Home) -> None:
    """Replace damaged databases. The caller holds the home's lock.

    Raise OSError and sqlite3.Error for disk errors, MachineError if another program holds one of the files.
    """
    snapshot = EventLogSnapshot(home)
    record = snapshot.read()
    if record.num_damaged:
        log.warning("%d lines of the event log are damaged: all readers skip them", record.num_damaged)
        _write(home, "recovered", file=home.events.name, why="lines that are no events", num_lost=record.num_damaged)
        snapshot.renew()  # else the next start reports them again
    _rescue_peers(home)
    reset_buffer_if_damaged(home, record)


def _rescue_peers(home: Home) -> None:
    rescued = rescue(home.peers, home.damaged, copy=copy_peers)
    if rescued is not None:
        name, why, num_rows, folder = rescued.name, rescued.why, rescued.num_rows, rescued.folder
        log.warning("%s was damaged (%s): %d peers are kept, the original is in %s", name, why, num_rows, folder)
        _write(home, "recovered", file=name, why=why, num_saved=num_rows, folder=str(folder))


def reset_buffer_if_damaged(home: Home, record: EventLogSummary) -> None:
    """Replace the buffer by an empty one if its file is damaged, or if it lost commits that `record` contains.

    `record` summarizes the event log, which also has the sequence numbers of own groups.
    """
    found: list[LostCommits] = []

    def look(buffer: sqlite3.Connection) -> str:
        if wrong := missing_columns(buffer):
            return wrong
        found.extend(filter(None, [find_lost_commits(buffer, record)]))
        return str(found[0]) if found else ""

    def write_empty(_: sqlite3.Connection, path: Path) -> int:
        write_empty_buffer(path, record=record)
        return 0

    reset = rescue(home.replay, home.damaged, copy=write_empty, look=look)
    is_missing = not (home.replay.exists() and home.replay.stat().st_size)
    if reset is not None:
        log.warning("replay buffer damaged: it starts empty; %s; the original is in %s", reset.why, reset.folder)
        if not (found and reset.why == str(found[0])):
            _write(home, "recovered", file=reset.name, why=reset.why, num_saved=0, folder=str(reset.folder))
            return
        lost = found[0]
    elif is_missing and (record.expected or record.used or record.last_number):
        log.warning("replay buffer missing: it starts empty, although the event log records groups in it")
        home.replay.unlink(missing_ok=True)
        write_empty_buffer(home.replay, record=record)
        lost = LostCommits(len(record.expected), 0, record.last_number)
    else:
        return
    _write(
        home,
        "buffer_rolled_back",
        num_lost=lost.num_missing,
        num_used=lost.num_wrong,
        last_number=lost.last_number,
    )


def _write(home: Home, name: str, **fields: str | int) -> None:
    with closing(EventLog(home.events)) as events:
        events.write(name, **fields)


def release_damaged(buffer: ReplayBuffer, events: EventLog) -> None:
    """Release groups whose bytes do not match their checksum."""
    for group_id in buffer.release_damaged():
        log.warning("group %s is damaged: released unused", group_id.hex()[:12])
        events.write("released", group=group_id, reason=ReleaseReason.DAMAGED)


def log_unknown_steps(state: LearnerState, *, done: int, holds: Callable[[bytes], object], events: EventLog) -> None:
    """Log and record that the checkpoint includes steps that are not in the event log; change nothing.

    `done` is the last step in the event log. `holds` returns None for a group that the buffer does not have. A node
    that ends before it records a step leaves a checkpoint one step ahead. The buffer then has that step's groups.
    """
    groups = [bytes.fromhex(name) for name in state.last_groups or ()]
    is_next = state.step == done + 1 and (not groups or any(holds(group) is not None for group in groups))
    if state.step <= done or is_next:
        return
    log.warning(
        "the event log has step %d, the checkpoint step %d: one is another home's, or log lines are lost; training "
        "resumes after step %d",
        *(done, state.step, state.step),
    )
    events.write("steps_unknown", step=state.step, done=done)
