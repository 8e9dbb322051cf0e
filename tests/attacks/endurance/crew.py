"""The process of the attackers, as the run has it: switched on and off, and listened to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NICE = 10  # the attackers of the world have machines of their own
READY_S, QUIET_S, END_S = 300.0, 240.0, 20.0  # of a busy machine
LINE_BYTES = 1 << 20


class Crew:
    """All attackers. `done` counts actions by kind; `attack_of` has the attack by each member's peer id."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.per_day: dict[str, int] = {}
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.last_errors: dict[str, str] = {}
        self.attack_of: dict[str, str] = {}
        self.liars: set[str] = set()
        self.listening = asyncio.create_task(self._listen())  # ends with the process
        self._ready, self._quiet = asyncio.Event(), asyncio.Event()

    async def on(self) -> None:
        """Begins to attack."""
        self._quiet.clear()
        await self._order(b"on\n")

    async def off(self) -> None:
        """Returns when all attacks have ended."""
        await self._order(b"off\n")
        async with asyncio.timeout(QUIET_S):
            await self._quiet.wait()

    async def ready(self) -> None:
        """Returns when the process can take orders. Raises TimeoutError where it cannot."""
        async with asyncio.timeout(READY_S):
            await self._ready.wait()

    def shares(self) -> dict[str, float]:
        """Of a day's actions, how much of each kind was done."""
        return {name: self.done[name] / per_day for name, per_day in self.per_day.items()}

    async def _order(self, order: bytes) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(order)
        await self.child.stdin.drain()

    async def _listen(self) -> None:
        """Takes what the process says, until it ends."""
        assert self.child.stdout is not None
        async for line in self.child.stdout:
            with suppress(ValueError):  # a library's own line
                self._take(json.loads(line))

    def _take(self, told: dict[str, Any]) -> None:
        match told:
            case {"what": "ready", "per_day": per_day}:
                self.per_day = per_day
                self._ready.set()
            case {"what": "quiet"}:
                self._quiet.set()
            case {"what": "member", "peer": peer, "attack": attack, "liar": is_liar}:
                self.attack_of[peer] = attack
                if is_liar:
                    self.liars.add(peer)
            case {"what": "count", "attack": attack, "actions": actions}:
                self.done[attack] += actions
            case {"what": "error", "attack": attack, "error": error}:
                self.errors[attack] += 1
                self.last_errors[attack] = error


@asynccontextmanager
async def crew(config: dict[str, Any], log: Path) -> AsyncIterator[Crew]:
    """Starts the process; at the end nothing of it is left."""
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.attacks.endurance.attackers", json.dumps(config)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            preexec_fn=lambda: os.nice(NICE),
            limit=LINE_BYTES,
            start_new_session=True,  # ctrl-C is the run's to handle
        )
    one = Crew(child)
    try:
        await one.ready()
        yield one
    finally:
        await asyncio.shield(_end(child))
        one.listening.cancel()


async def _end(child: asyncio.subprocess.Process) -> None:
    """Closes its input, waits, and kills by pid what is left."""
    if child.returncode is not None:
        return
    family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    assert child.stdin is not None
    child.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await child.wait()
    for process in family:
        with suppress(psutil.NoSuchProcess):
            if process.is_running():
                process.send_signal(signal.SIGKILL)
    await child.wait()
