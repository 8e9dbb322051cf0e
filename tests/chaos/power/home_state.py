"""The state of a home while no process uses it, and the losses between two states.

The databases are read from copies, because opening one after a kill would recover it in place of the node.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.records.envelope import open_envelope
from ftis_node.workers.durable import is_complete

SQLITE_FILES = ("", "-wal")


@dataclass(frozen=True, slots=True)
class HomeState:
    """The durable state of a home.

    `groups`: id of the body by (sender, number). `steps`: those with a complete checkpoint. `events`: the event log.
    """

    identity: bytes = b""
    groups: Mapping[tuple[str, int], str] = field(default_factory=dict)
    last_number: int = 0
    steps: frozenset[int] = frozenset()
    events: bytes = b""
    banned: frozenset[str] = frozenset()

    @property
    def newest_step(self) -> int:
        """The step of the newest complete checkpoint, or 0."""
        return max(self.steps, default=0)

    def logged_steps(self) -> list[int]:
        """Return the steps in the event log, in order."""
        return [event["step"] for event in events_in(self.events) if event["event"] == "step"]


def read_home_state(root: Path) -> HomeState:
    """Return the state of the home at `root`, which may be incomplete. No file is changed."""
    home = Home(root)
    groups, last_number = _read_groups(home.replay)
    steps = {int(path.name.rpartition("-")[2]) for path in home.checkpoints.glob("step-*") if is_complete(path)}
    return HomeState(
        identity=home.identity.read_bytes() if home.identity.exists() else b"",
        groups=groups,
        last_number=last_number,
        steps=frozenset(steps),
        events=home.events.read_bytes() if home.events.exists() else b"",
        banned=_read_banned(home.peers),
    )


def events_in(event_log: bytes) -> list[dict[str, object]]:
    """Return the events of the complete lines."""
    return [json.loads(line) for line in event_log[: event_log.rfind(b"\n") + 1].splitlines()]


def losses(before: HomeState, after: HomeState) -> list[str]:
    """Return a description of each acknowledged state before a cut that is missing after the restart."""
    return [
        *_lost_identity(before, after),
        *_lost_groups(before.groups, after.groups),
        *_lost_events(before.events, after.events),
        *(f"the ban of {peer} is lost" for peer in sorted(before.banned - after.banned)),
        *(["the sequence number fell"] if after.last_number < before.last_number else []),
        *(["the newest checkpoint is older"] if after.newest_step < before.newest_step else []),
    ]


def resumption_errors(before: HomeState, steps_since: Iterable[int]) -> list[str]:
    """Return the errors in the logged steps since the restart.

    The first step follows the newest complete checkpoint. It may also be the step of that checkpoint, if the cut came
    before the step was logged.
    """
    expected, logged = before.newest_step + 1, before.logged_steps()
    errors = []
    if max(logged, default=0) >= expected:
        errors.append(f"step {max(logged)} was logged without a complete checkpoint")
    for step in steps_since:
        if step not in (expected, expected - 1) or step in logged:
            earlier = "logged" if step in logged else "not logged"
            errors.append(f"step {step} came after the checkpoint of step {expected - 1}, {earlier} before")
        expected, logged = step + 1, [*logged, step]
    return errors


def _lost_identity(before: HomeState, after: HomeState) -> list[str]:
    return ["the identity changed"] if before.identity and before.identity != after.identity else []


def _lost_groups(before: Mapping[tuple[str, int], str], after: Mapping[tuple[str, int], str]) -> list[str]:
    lost = []
    for (sender, number), group in before.items():
        if (found := after.get((sender, number))) != group:
            lost.append(f"group {number} of {sender[-6:]} {'is lost' if found is None else 'has another body'}")
    return lost


def _lost_events(before: bytes, after: bytes) -> list[str]:
    complete = before[: before.rfind(b"\n") + 1]
    return [] if after.startswith(complete) else ["the event log lost or changed a line"]


def _read_groups(path: Path) -> tuple[dict[tuple[str, int], str], int]:
    rows = _rows(path, "SELECT sender, number, envelope, id FROM groups")
    groups = {}
    for sender, number, envelope, group_id in rows:
        body = open_envelope(envelope).body
        assert hashlib.sha256(body).digest() == group_id, "the buffer has a group with another id"
        groups[sender, number] = group_id.hex()
    totals = dict(_rows(path, "SELECT name, value FROM totals"))
    return groups, totals.get("last_number", 0)


def _read_banned(path: Path) -> frozenset[str]:
    rows = _rows(path, "SELECT peer_id, banned_until FROM peers")
    return frozenset(peer_id for peer_id, banned_until in rows if banned_until > time.time())


def _rows(path: Path, query: str) -> list[tuple[object, ...]]:
    """Query a copy of the database with its write-ahead log; return nothing if the table does not exist yet."""
    with tempfile.TemporaryDirectory(prefix="ftis-home-state-") as folder:
        for suffix in SQLITE_FILES:
            if (source := path.with_name(path.name + suffix)).exists():
                shutil.copy(source, Path(folder) / source.name)
        with closing(sqlite3.connect(Path(folder) / path.name)) as database:
            try:
                return database.execute(query).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):
                    return []
                raise
