"""What a node's home holds at a moment when no process has it open, and what of it a restart has lost.

`Kept` is read from copies: opening a database whose writer was killed would recover it, and that is the node's own
work. `losses` is pure: two of them in, sentences out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.config.home import Home
from ftis_node.records.envelope import open_envelope
from ftis_node.workers.durable import is_complete

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SQLITE_FILES = ("", "-wal")


@dataclass(frozen=True, slots=True)
class Kept:
    """`groups`: id of the body by (sender, running number); `steps`: those with a complete checkpoint."""

    identity: bytes = b""
    groups: Mapping[tuple[str, int], str] = field(default_factory=dict)
    last_number: int = 0
    steps: frozenset[int] = frozenset()
    events: bytes = b""
    banned: frozenset[str] = frozenset()

    @property
    def newest_step(self) -> int:
        """Of the complete checkpoints; 0 before the first."""
        return max(self.steps, default=0)

    def told_steps(self) -> list[int]:
        """The steps of which the event trail tells, in its order."""
        return [event["step"] for event in events_in(self.events) if event["event"] == "step"]


def read_kept(root: Path) -> Kept:
    """The home at `root`, whatever of it is there already; nothing in it is changed."""
    home = Home(root)
    groups, last_number = _read_groups(home.replay)
    steps = {int(path.name.rpartition("-")[2]) for path in home.checkpoints.glob("step-*") if is_complete(path)}
    return Kept(
        identity=home.identity.read_bytes() if home.identity.exists() else b"",
        groups=groups,
        last_number=last_number,
        steps=frozenset(steps),
        events=home.events.read_bytes() if home.events.exists() else b"",
        banned=_read_banned(home.peers),
    )


def events_in(trail: bytes) -> list[dict[str, object]]:
    """The events of the complete lines."""
    return [json.loads(line) for line in trail[: trail.rfind(b"\n") + 1].splitlines()]


def losses(before: Kept, after: Kept) -> list[str]:
    """What was acknowledged before a cut and is not there after the restart; empty where nothing was lost."""
    return [
        *_lost_identity(before, after),
        *_lost_groups(before.groups, after.groups),
        *_lost_events(before.events, after.events),
        *(f"the ban of {peer} is forgotten" for peer in sorted(before.banned - after.banned)),
        *(["the running number went back"] if after.last_number < before.last_number else []),
        *(["the newest checkpoint went back"] if after.newest_step < before.newest_step else []),
    ]


def wrong_resumption(before: Kept, told_since: Iterable[int]) -> list[str]:
    """What is wrong with where the steps go on, by what the trail tells since the restart.

    The first is the one after the newest complete checkpoint; or that checkpoint's own, where the cut came before the
    trail could tell of it.
    """
    expected, told = before.newest_step + 1, before.told_steps()
    wrong = (
        [f"step {max(told)} was told and its checkpoint was not complete"] if max(told, default=0) >= expected else []
    )
    for step in told_since:
        if step not in (expected, expected - 1) or step in told:
            wrong.append(f"step {step} came after the checkpoint of step {expected - 1}, told before: {step in told}")
        expected, told = step + 1, [*told, step]
    return wrong


def _lost_identity(before: Kept, after: Kept) -> list[str]:
    return ["the identity is another"] if before.identity and before.identity != after.identity else []


def _lost_groups(before: Mapping[tuple[str, int], str], after: Mapping[tuple[str, int], str]) -> list[str]:
    lost = []
    for (sender, number), group in before.items():
        if (found := after.get((sender, number))) != group:
            what = "is lost" if found is None else "is another body now"
            lost.append(f"group {number} of {sender[-6:]} {what}")
    return lost


def _lost_events(before: bytes, after: bytes) -> list[str]:
    whole = before[: before.rfind(b"\n") + 1]
    return [] if after.startswith(whole) else ["the event trail lost or changed a line"]


def _read_groups(path: Path) -> tuple[dict[tuple[str, int], str], int]:
    rows = _rows(path, "SELECT sender, number, envelope, id FROM groups")
    groups = {}
    for sender, number, envelope, group_id in rows:
        body = open_envelope(envelope).body
        assert hashlib.sha256(body).digest() == group_id, "the buffer has a group under another id"
        groups[sender, number] = group_id.hex()
    totals = dict(_rows(path, "SELECT name, value FROM totals"))
    return groups, totals.get("last_number", 0)


def _read_banned(path: Path) -> frozenset[str]:
    rows = _rows(path, "SELECT peer_id, banned_until FROM peers")
    return frozenset(peer_id for peer_id, banned_until in rows if banned_until > time.time())


def _rows(path: Path, query: str) -> list[tuple[object, ...]]:
    """Of a copy of the database with its journal; none where it has not got that table yet."""
    with tempfile.TemporaryDirectory(prefix="ftis-kept-") as folder:
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
