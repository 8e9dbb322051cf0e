"""Opening of a home before its node starts: its lock, and recovery of damaged files without the operator.

Each recovery has one `recovered` event.

    a damaged `peers.sqlite`              moved to damaged/; all peers are new
    a damaged `replay.sqlite`             moved to damaged/; the buffer starts empty
    a buffer of an earlier start, or one  the same
    without its last commits
    a missing buffer of an earlier start  the buffer starts empty

A group that fails its checksum is released unused. A node does not fetch lost groups of peers again, because it may
have trained on them. Within minutes it has new ones.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from ftis_node.config.home import Home
from ftis_node.config.home_files import check_schema, mark, marked_epoch
from ftis_node.errors import DamagedError, MachineError
from ftis_node.files import disk_full, is_disk_full
from ftis_node.replay import database
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.integrity import set_aside_damaged
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reset import find_fault, write_empty_buffer
from ftis_node.telemetry.events import EventLog, last_lines

log = logging.getLogger(__name__)


@contextmanager
def opened_home(home: Home) -> Iterator[None]:
    """Hold the home's lock while the block runs. Under it, damaged files are replaced first.

    Raise UsageError for a home in use, ConfigError for one of another version, MachineError for a full or broken disk.
    """
    check_schema(home)
    with suppress(DamagedError):  # refuse another version's buffer before any change; a damaged one is replaced
        if home.replay.exists():
            database.check_schema(home.replay)
    with home.owned():
        try:
            replace_files(home)
            if not home.marker.exists():
                mark(home, epoch=0)
        except (OSError, sqlite3.Error) as error:
            if is_disk_full(error, home.root):
                raise disk_full(home.root) from None
            raise MachineError(f"cannot open {home.root}: {error}; check its disk and start again") from None
        yield


def replace_files(home: Home) -> None:
    """Replace damaged databases. The caller holds the home's lock.

    Raise OSError and sqlite3.Error for disk errors, MachineError if another program holds one of the files.
    """
    if damage := set_aside_damaged(home.peers, home.damaged):
        log.warning("%s was damaged (%s): all peers are new; it is in %s", home.peers.name, *damage)
        _write(home, file=home.peers.name, why=damage.why, folder=str(damage.folder))
    epoch = marked_epoch(home)

    def look(buffer: sqlite3.Connection) -> str:
        return find_fault(buffer, epoch=epoch, last_events=last_lines(home.events))

    if damage := set_aside_damaged(home.replay, home.damaged, look=look):
        log.warning("replay buffer damaged: it starts empty; %s; the original is in %s", *damage)
        write_empty_buffer(home.replay, epoch=epoch)
        _write(home, file=home.replay.name, why=damage.why, folder=str(damage.folder))
    elif epoch and not (home.replay.exists() and home.replay.stat().st_size):
        log.warning("replay buffer missing: it starts empty, although this home had one")
        write_empty_buffer(home.replay, epoch=epoch)
        _write(home, file=home.replay.name, why="it was missing")


def _write(home: Home, **fields: str) -> None:
    with closing(EventLog(home.events)) as events:
        events.write("recovered", **fields)


def release_damaged(buffer: ReplayBuffer, events: EventLog) -> None:
    """Release groups whose bytes do not match their checksum."""
    for group_id in buffer.release_damaged():
        log.warning("group %s is damaged: released unused", group_id.hex()[:12])
        events.write("released", group=group_id, reason=ReleaseReason.DAMAGED)
