"""The disk space of a home: its use, measured from its files, its limit, and the gate that a full home closes.

    free     the smaller of the space below the limit and the free space of the disk
    reserve  space for the next checkpoint, groups in progress and log lines

    free < reserve + cushion     nearly full: the node removes files that are not needed
    free < reserve               full: the node pauses
    free >= reserve + margin     after full: the node continues; the margin is cushion/2, at most reserve/4

All are in bytes. A write that a full disk refuses closes the gate too, and is repeated until it succeeds.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ftis_node.backoff import ExponentialBackoff
from ftis_node.config.home import Home
from ftis_node.config.limits import KEPT_CHECKPOINTS
from ftis_node.errors import DiskFullError
from ftis_node.files import free_bytes, is_disk_full
from ftis_node.telemetry.terminal_text import size
from ftis_node.workers.durable import TEMPORARY_MARK

CHECKPOINT = re.compile(r"step-\d+")
CUSHION_SHARE = 16  # of the limit
MAX_CUSHION_BYTES = 1 << 30
UNLIMITED_BYTES = 1 << 60
RETRY_PAUSE = ExponentialBackoff(first_s=1.0, ceiling_s=15.0)  # of a write that a full disk refused
R = TypeVar("R")


class DiskSpace:
    """Gate that is closed while the home is full, or while a write waits for space. For one event loop.

    Open until the first measurement.
    """

    def __init__(self, limit: HomeLimit | None = None, *, root: Path | None = None) -> None:
        """If `limit` is None, only the size of the disk limits the home. `root` is the home; None: this folder."""
        self.limit = limit or HomeLimit(UNLIMITED_BYTES, reserve_bytes=0)
        self.use: HomeUse | None = None
        self._root = root or Path()
        self._measured = ""  # why the home is full, by the last measurement
        self._refused: dict[object, str] = {}  # writes that wait for space, with the reason
        self._has_ended = False
        self._has_space = asyncio.Event()
        self._has_space.set()

    @property
    def why_full(self) -> str:
        """Return the reason for the pause as a clause, "" without a pause."""
        return self._measured or next(iter(self._refused.values()), "")

    async def wait_available(self) -> None:
        await self._has_space.wait()

    def note(self, use: HomeUse) -> None:
        """Store a new measurement, and open or close the gate."""
        self.use = use
        self._measured = self.limit.why_full(use, was_full=bool(self._measured))
        self._move_gate()

    async def retried(self, write: Callable[[], Awaitable[R]]) -> R:
        """Return the result of `write()`, which is called again until the disk has space for it.

        Raise CancelledError when the node stops meanwhile: the write is not acknowledged.
        """
        token, num_tries = object(), 0
        try:
            while True:
                try:
                    return await write()
                except Exception as error:
                    if not is_disk_full(error, self._root):
                        raise
                    if self._has_ended:
                        raise asyncio.CancelledError("the node stops while the disk is full") from error
                    why = f"the disk is full: {size(free_bytes(self._root))} are free"
                    if isinstance(error, DiskFullError):  # of the learner, perhaps on another disk
                        why = str(error).split(";", 1)[0]
                    self._refused[token] = why
                num_tries += 1
                self._move_gate()
                await asyncio.sleep(RETRY_PAUSE.delay_s(num_tries))
        finally:
            self._refused.pop(token, None)
            self._move_gate()

    async def end(self) -> None:
        """Let no write wait for space any longer, because the node stops."""
        self._has_ended = True

    def _move_gate(self) -> None:
        if self.why_full:
            self._has_space.clear()
        else:
            self._has_space.set()


@dataclass(frozen=True, slots=True)
class HomeUse:
    """Disk use in bytes: the home's files, and the free space of the disk. Checkpoints in progress, and those to be
    removed soon, count as free, because the reserve covers them."""

    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class HomeLimit:
    """The size limit of a home and the reserve below it, in bytes."""

    limit_bytes: int
    reserve_bytes: int

    @property
    def cushion_bytes(self) -> int:
        """Return the extra bytes to free above the reserve, so that not every check has to free some."""
        return min(self.limit_bytes // CUSHION_SHARE, MAX_CUSHION_BYTES)

    def missing_bytes(self, use: HomeUse) -> int:
        """Return the number of bytes to remove; 0 if there is enough space."""
        return max(0, self.reserve_bytes + self.cushion_bytes - self._room(use))

    def why_full(self, use: HomeUse, *, was_full: bool) -> str:
        """Return the reason for a pause of generation and pulls, as a clause; "" if there is enough space."""
        needed = self.reserve_bytes + (min(self.cushion_bytes // 2, self.reserve_bytes // 4) if was_full else 0)
        if self._room(use) >= needed:
            return ""
        needs = f"the next checkpoint and groups need {size(self.reserve_bytes)}"
        if use.free_bytes < self.limit_bytes - use.used_bytes:
            return f"the disk is full: {size(use.free_bytes)} are free, {needs}"
        return f"the home is full: {size(use.used_bytes)} of {size(self.limit_bytes)} are used, {needs}"

    def _room(self, use: HomeUse) -> int:
        return min(self.limit_bytes - use.used_bytes, use.free_bytes)


def measure_usage(home: Home) -> HomeUse:
    """Return the present use of the home, without libraries' caches. Checkpoints that are not kept count as free."""
    checkpoints: dict[str, int] = {}
    used = passing = 0
    for path, num_bytes in _files(home.root):
        parts = path.relative_to(home.root).parts
        if parts[0] == home.user.name:
            continue
        if any(TEMPORARY_MARK in part for part in parts):
            passing += num_bytes
        elif parts[0] == home.checkpoints.name and CHECKPOINT.fullmatch(parts[1]):
            checkpoints[parts[1]] = checkpoints.get(parts[1], 0) + num_bytes
        else:
            used += num_bytes
    newest_first = [checkpoints[name] for name in sorted(checkpoints, reverse=True)]
    passing += sum(newest_first[KEPT_CHECKPOINTS:])
    return HomeUse(used + sum(newest_first[:KEPT_CHECKPOINTS]), free_bytes(home.root) + passing)


def _files(root: Path) -> list[tuple[Path, int]]:
    """Return each file with its size in bytes; skip files that are removed meanwhile."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            try:
                found.append((path, path.lstat().st_size))
            except FileNotFoundError:
                continue
    return found
