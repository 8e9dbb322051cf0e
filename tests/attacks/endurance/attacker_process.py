"""The process of the attackers as the run sees it: start, stop and messages."""

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

NICE = 10  # real attackers use other machines
READY_S, QUIET_S, END_S = 300.0, 240.0, 20.0  # on a busy machine
LINE_BYTES = 1 << 20


class AttackerProcess:
    """The attackers. `done` counts actions by kind; `attack_of` maps a member's peer id to its attack."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.per_day: dict[str, int] = {}
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.last_errors: dict[str, str] = {}
        self.attack_of: dict[str, str] = {}
        self.malicious: set[str] = set()
        self.listening = asyncio.create_task(self._listen())  # ends with the process
        self._ready, self._quiet = asyncio.Event(), asyncio.Event()

    async def on(self) -> None:
        """Start the attacks."""
        self._quiet.clear()
        await self._send(b"on\n")

    async def off(self) -> None:
        """Stop all attacks and wait for their end."""
        await self._send(b"off\n")
        async with asyncio.timeout(QUIET_S):
            await self._quiet.wait()

    async def ready(self) -> None:
        """Wait until the process accepts commands. Raises TimeoutError if it does not."""
        async with asyncio.timeout(READY_S):
            await self._ready.wait()

    def shares(self) -> dict[str, float]:
        """Return the share of a day's actions that each kind has done."""
        return {name: self.done[name] / per_day for name, per_day in self.per_day.items()}

    async def _send(self, command: bytes) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(command)
        await self.child.stdin.drain()

    async def _listen(self) -> None:
        """Read the messages of the process until it ends."""
        assert self.child.stdout is not None
        async for line in self.child.stdout:
            with suppress(ValueError):  # a line of a library
                self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        match message:
            case {"type": "ready", "per_day": per_day}:
                self.per_day = per_day
                self._ready.set()
            case {"type": "quiet"}:
                self._quiet.set()
            case {"type": "member", "peer": peer, "attack": attack, "malicious": is_malicious}:
                self.attack_of[peer] = attack
                if is_malicious:
                    self.malicious.add(peer)
            case {"type": "count", "attack": attack, "actions": actions}:
                self.done[attack] += actions
            case {"type": "error", "attack": attack, "error": error}:
                self.errors[attack] += 1
                self.last_errors[attack] = error


@asynccontextmanager
async def attacking_process(config: dict[str, Any], log: Path) -> AsyncIterator[AttackerProcess]:
    """Run the process, and end it with its children when the block ends."""
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.attacks.endurance.attackers", json.dumps(config)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            preexec_fn=lambda: os.nice(NICE),
            limit=LINE_BYTES,
            start_new_session=True,  # the run handles Ctrl-C
        )
    attackers = AttackerProcess(child)
    try:
        await attackers.ready()
        yield attackers
    finally:
        await asyncio.shield(_end(child))
        attackers.listening.cancel()


async def _end(child: asyncio.subprocess.Process) -> None:
    """Close its input, wait for its end, and kill remaining processes by pid."""
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
