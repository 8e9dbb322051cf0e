"""The process of the attackers as the run sees it: start, stop and messages."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

NICE = 10  # real attackers use other machines
READY_S, QUIET_S, END_S = 300.0, 240.0, 20.0  # on a busy machine
LINE_BYTES = 1 << 20


class AttackerProcess:
    """The attackers. `done` counts actions by kind; `kind_of` maps a member's peer id to its kind."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.kinds: list[str] = []
        self.done, self.errors = Counter[str](), Counter[str]()
        self.last_errors: dict[str, str] = {}
        self.kind_of: dict[str, str] = {}
        self.malicious: set[str] = set()
        self._child = child
        self._is_quiet = asyncio.Event()  # also once the process is ready
        self.listening = asyncio.create_task(self._listen())  # ends with the process

    async def on(self) -> None:
        """Start the attacks."""
        self._is_quiet.clear()
        await self._send(b"on\n")

    async def off(self) -> None:
        """Stop all attacks and wait for their end."""
        await self._send(b"off\n")
        await self.quiet(QUIET_S)

    async def quiet(self, within_s: float) -> None:
        """Wait until no attack runs. Raises TimeoutError if that takes longer."""
        async with asyncio.timeout(within_s):
            await self._is_quiet.wait()

    async def _send(self, command: bytes) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(command)
        await self._child.stdin.drain()

    async def _listen(self) -> None:
        """Read the messages of the process until it ends."""
        assert self._child.stdout is not None
        async for line in self._child.stdout:
            with suppress(ValueError):  # a line of a library
                self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        match message:
            case {"kinds": kinds}:
                self.kinds = kinds
                self._is_quiet.set()
            case {"quiet": True}:
                self._is_quiet.set()
            case {"member": peer, "kind": kind, "malicious": is_malicious}:
                self.kind_of[peer] = kind
                self.malicious |= {peer} if is_malicious else set()
            case {"kind": kind, "actions": actions}:
                self.done[kind] += actions
            case {"kind": kind, "error": error}:
                self.errors[kind] += 1
                self.last_errors[kind] = error


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
        await attackers.quiet(READY_S)
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
            process.kill()
    await child.wait()
