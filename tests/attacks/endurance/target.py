"""What an attacker of the endurance run may use: the node's address and run, and folders for sockets."""

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
    """A process that somebody else started, in the place of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        """None while it runs."""
        is_alive = self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        return None if is_alive else -1


@dataclass
class Scene:
    """One per process of attackers. `on_member` is called with the peer id of each member that attacks."""

    victim: Victim
    maker: GroupMaker
    sockets: Path
    rng: random.Random
    on_member: Callable[[str], None]
    numbers: Iterator[int]  # of folders

    def folder(self) -> Path:
        """A new one, short enough for sockets; not made yet."""
        return self.sockets / str(next(self.numbers))

    async def target(self) -> Target:
        """As visitors have it."""
        return Target.of((await self.victim.addresses())[0], self.maker)

    @asynccontextmanager
    async def member(self, **options: Any) -> AsyncIterator[Member]:
        """A new identity, connected to the node; `options` as those of `joined`."""
        async with joined(self.folder(), self.maker, self.victim, **options) as member:
            self.on_member(member.peer_id)
            yield member
