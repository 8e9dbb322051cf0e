"""Whether the home has room for more, and what of the machine is in use: what the loops ask and the status shows.

consumes (the room loop): the home's files, the process     produces: `why_full`, room in a full home, turned-over logs
waits for: the clock                                        unblocked by: time

A home that is nearly full is tidied first (cleanup.py). Where that is not enough, generation and pulling wait here
until there is room: the node trains on what it has, serves its peers, and says why it waits.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftis_node.node.storage.cleanup import tidied, turn_over_logs
from ftis_node.node.storage.usage import HomeLimit, HomeUse, look_at
from ftis_node.node.supervision.background import in_background
from ftis_node.telemetry.sizes import size

if TYPE_CHECKING:
    from ftis_node.node.context import Parts

log = logging.getLogger(__name__)

PERIOD_S = 2.0
UNLIMITED_BYTES = 1 << 60


class Room:
    """The home's limit and its last look. Everything has room until a look says otherwise. For one event loop."""

    def __init__(self, limit: HomeLimit | None = None) -> None:
        """`limit` None: only the end of the disk."""
        self.limit = limit or HomeLimit(UNLIMITED_BYTES, reserve_bytes=0)
        self.use: HomeUse | None = None
        self.why_full = ""
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def until_there(self) -> None:
        """Returns when there is room for another group."""
        await self._has_room.wait()

    def note(self, use: HomeUse) -> None:
        """How the home stands now."""
        self.use = use
        self.why_full = self.limit.why_full(use, was_full=bool(self.why_full))
        if self.why_full:
            self._has_room.clear()
        else:
            self._has_room.set()


@dataclass(slots=True)
class RoomLoop:
    """Looks at the home every few seconds."""

    parts: Parts
    period_s: float = PERIOD_S
    _said: str = field(default="", init=False)

    async def run(self) -> None:
        """Until cancelled. Raises OSError for a home that cannot be read."""
        while True:
            await self.look()
            await asyncio.sleep(self.period_s)

    async def look(self) -> None:
        """Turns over what is too long, tidies where it is needed, and says how the home stands."""
        parts, room = self.parts, self.parts.room
        await in_background(turn_over_logs, parts.home, max_bytes=parts.settings.limits.log_file_bytes)
        use = await self._use()
        if missing_bytes := room.limit.missing_bytes(use):
            async for what, num_bytes in tidied(parts, missing_bytes, look=self._use):
                log.info("%s went to make room: %s", what, size(num_bytes))
                parts.events.write("disk_reclaimed", what=what, num_bytes=num_bytes)
            use = await self._use()
        room.note(use)
        self._tell(use)

    async def _use(self) -> HomeUse:
        keep = self.parts.settings.learner.keep_checkpoints
        return await in_background(look_at, self.parts.home, keep_checkpoints=keep)

    def _tell(self, use: HomeUse) -> None:
        """A line and an event where the node begins to wait, and where it goes on."""
        why_full = self.parts.room.why_full
        if bool(why_full) == bool(self._said):
            return
        self._said = why_full
        change = "paused" if why_full else "resumed"
        self.parts.events.write(change, reason=why_full, used_bytes=use.used_bytes, free_bytes=use.free_bytes)
        if why_full:
            log.warning("nothing is made or pulled until there is room: %s", why_full)
        else:
            log.info("there is room again, the node goes on")
