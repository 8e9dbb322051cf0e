"""Resources of the attackers of the endurance run: the node's address and run, and folders for sockets."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from tests.attacks.member import joined
from tests.attacks.visitors.host import Target

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from bench.stubs.group_maker import GroupMaker
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim


class OtherProcess:
    """A process of another parent, with the interface of `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        """Return None while the process runs."""
        is_alive = self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        return None if is_alive else -1


@dataclass
class Scene:
    """The state that attackers of one process share. `on_member` gets the peer id of each attacking member."""

    victim: Victim
    maker: GroupMaker
    sockets: Path
    rng: random.Random
    on_member: Callable[[str], None]
    numbers: Iterator[int]  # of folders

    def folder(self) -> Path:
        """Return a path for a new folder, short enough for sockets."""
        return self.sockets / str(next(self.numbers))

    async def target(self) -> Target:
        """Return the node as visitors address it."""
        return Target.of((await self.victim.addresses())[0], self.maker)

    @asynccontextmanager
    async def member(self, **options: Any) -> AsyncIterator[Member]:
        """Yield a new connected member; `options` are those of `joined`."""
        async with joined(self.folder(), self.maker, self.victim, **options) as member:
            self.on_member(member.peer_id)
            yield member
