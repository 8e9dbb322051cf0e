"""What all visitors have in common."""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.attacks.visitors.host import Target


class Visitor(ABC):
    """A kind of visitor. `name` is for reports."""

    name: str

    @abstractmethod
    async def visit(self, target: Target, folder: Path) -> int:
        """One visit; returns how many things it did to the target.

        `folder` is the visitor's own, and short enough for sockets. What the target refuses is no error; an error
        means that the visitor itself does not work.
        """


async def output_of(name: str, *command: str, within_s: float) -> str:
    """What a program prints. Raises RuntimeError with its last words where it fails; nothing of it is left."""
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(within_s):
            out, err = await child.communicate()
    finally:
        with suppress(ProcessLookupError):  # its session: what it started has its process group
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
    if child.returncode != 0:
        raise RuntimeError(f"the {name} failed: {err.decode(errors='replace')[-2000:]}")
    return out.decode()
