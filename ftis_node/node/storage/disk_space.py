"""The disk use of a home, measured from its files, and the rule that compares it with the limit.

    free     the smaller of the space below the limit and the free space of the disk
    reserve  space for the next checkpoint, groups in progress and log lines

    free < reserve + cushion     nearly full: the node removes files that are not needed (cleanup.py)
    free < reserve               full: the node pauses
    free >= reserve + cushion/2  after full: the node continues

All are in bytes.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.config.disk_room import free_bytes
from ftis_node.telemetry.terminal_text import size
from ftis_node.workers.durable import TEMPORARY_MARK

if TYPE_CHECKING:
    from ftis_node.config.home import Home

CHECKPOINT = re.compile(r"step-\d+")
CUSHION_SHARE = 16  # of the limit
MAX_CUSHION_BYTES = 1 << 30
UNLIMITED_BYTES = 1 << 60


class DiskSpace:
    """Gate that is closed while the home is full. Open until the first measurement. For one event loop."""

    def __init__(self, limit: HomeLimit | None = None) -> None:
        """If `limit` is None, only the size of the disk limits the home."""
        self.limit = limit or HomeLimit(UNLIMITED_BYTES, reserve_bytes=0)
        self.use: HomeUse | None = None
        self.why_full = ""
        self._has_space = asyncio.Event()
        self._has_space.set()

    async def wait_available(self) -> None:
        """Wait until there is space for another group."""
        await self._has_space.wait()

    def note(self, use: HomeUse) -> None:
        """Store a new measurement, and open or close the gate."""
        self.use = use
        self.why_full = self.limit.why_full(use, was_full=bool(self.why_full))
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
        needed = self.reserve_bytes + (self.cushion_bytes // 2 if was_full else 0)
        if self._room(use) >= needed:
            return ""
        needs = f"the next checkpoint and groups need {size(self.reserve_bytes)}"
        if use.free_bytes < self.limit_bytes - use.used_bytes:
            return f"the disk is full: {size(use.free_bytes)} are free, {needs}"
        return f"the home is full: {size(use.used_bytes)} of {size(self.limit_bytes)} are used, {needs}"

    def _room(self, use: HomeUse) -> int:
        return min(self.limit_bytes - use.used_bytes, use.free_bytes)


def measure_usage(home: Home, *, keep_checkpoints: int) -> HomeUse:
    """Return the present use of the home. Count checkpoints beyond the newest `keep_checkpoints` as free space."""
    checkpoints: dict[str, int] = {}
    used = passing = 0
    for path, num_bytes in _files(home.root):
        parts = path.relative_to(home.root).parts
        if any(TEMPORARY_MARK in part for part in parts):
            passing += num_bytes
        elif parts[0] == home.checkpoints.name and CHECKPOINT.fullmatch(parts[1]):
            checkpoints[parts[1]] = checkpoints.get(parts[1], 0) + num_bytes
        else:
            used += num_bytes
    newest_first = [checkpoints[name] for name in sorted(checkpoints, reverse=True)]
    passing += sum(newest_first[keep_checkpoints:])
    return HomeUse(used + sum(newest_first[:keep_checkpoints]), free_bytes(home.root) + passing)


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
