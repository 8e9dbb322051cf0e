"""The handle of a worker process that this process did not spawn but inherited (`preload.py`).

It has the part of `asyncio.subprocess.Process` that `process.py` uses.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from signal import Signals


class ProcessHandle(Protocol):
    """What the owner of a child process can do with it."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: Signals, /) -> None: ...


class ForkedProcess:
    """A child process by its id. Its end is awaited through a pidfd, and its exit status is collected at once."""

    def __init__(self, pid: int) -> None:
        """Raise ChildProcessError if `pid` is no child of this process."""
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises for another process
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """Return the exit code; negative for a signal."""
        return await asyncio.shield(self._exited)

    def send_signal(self, signal: Signals, /) -> None:
        """Send a signal to a process that has not ended."""
        if self.returncode is None:
            os.kill(self.pid, signal)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._exited.set_result(self.returncode)
