"""A node as a process of a script or notebook."""

from __future__ import annotations

import asyncio
import inspect
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from ftis_node.cli.commands.join import join
from ftis_node.config.home import Home
from ftis_node.config.workers import SAVE_LIMIT_S
from ftis_node.errors import FtisError, MachineError, NetworkError, UsageError
from ftis_node.node.http_api.node_client import read_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from types import TracebackType

    from ftis_node.telemetry.status import Status

log = logging.getLogger(__name__)

STOP_LIMIT_S: Final = SAVE_LIMIT_S + 60.0  # the node forces its own end before that
POLL_S: Final = 0.1
DRAIN_LIMIT_S: Final = 2.0
KEPT_LINES: Final = 50
OFF: Final = {"lora": "--full"}  # options whose False has a flag
OF_A_TERMINAL: Final = {"detach", "invitation"}  # options of `join` that a script does not need
ERRORS: Final = {error.exit_code: error for error in (UsageError, MachineError, NetworkError)}


class Node:
    """Handle of a `ftis-node join` process, exported as `ftis_node.Node`.

    The node runs inside `async with`, or between `start` and `stop`. Its log lines go to the logger of this module,
    at the level INFO. The node also stops when the interpreter exits.
    """

    def __init__(self, *, home: str | Path, **options: Any) -> None:
        """Take the options of `ftis-node join` as keywords, except those that only a terminal needs.

        None is as a missing one. Raises TypeError for an unknown one.
        """
        if unknown := options.keys() - (inspect.signature(join).parameters.keys() - OF_A_TERMINAL):
            raise TypeError(f"Node has no option {', '.join(sorted(unknown))}: see `ftis-node join --help`")
        self.home = Path(home).expanduser()
        self._words = [f"--home={self.home}", *_as_words(options)]
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._is_asked_to_stop = False

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if error is None:
            self._raise_failure()

    @property
    def pid(self) -> int:
        """The node's process id."""
        return self._running().pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the node; None while it runs, -N after the signal N."""
        return self._running().poll()

    async def start(self) -> Self:
        """Start the process. Raises UsageError if this object has started one."""
        if self._process is not None:
            raise UsageError("this Node was started before: make a new Node for the same home")
        process = _launched(self._words)
        assert process.stderr is not None
        self._process = process
        self._reader = threading.Thread(target=_drain, args=(process.stderr, self._lines), daemon=True)
        self._reader.start()
        weakref.finalize(self, _end, process)
        return self

    async def watch(self, *, every_s: float = 1.0) -> AsyncIterator[Status]:
        """Yield the document of `status --json` every `every_s` seconds, as soon as the home is this node's.

        It ends after the last status of a node that has ended. Raises the FtisError of the node's exit code if the node
        failed.
        """
        is_ours = False
        while self.exit_code is None:
            is_ours = is_ours or Home(self.home).holder() == self.pid  # else it has the status of an earlier node
            if is_ours and (status := await self._read_status()) is not None:
                yield status
            await self._wait_for_end(every_s)
        if is_ours and (status := await self._read_status()) is not None:
            yield status
        self._raise_failure()

    async def stop(self) -> None:
        """Send SIGTERM and wait until the node has saved its newest step and ended; kill after `STOP_LIMIT_S`.

        If it is cancelled, it kills at once. It leaves no zombie.
        """
        self._is_asked_to_stop = self._is_asked_to_stop or self.exit_code is None
        process = self._running()
        process.terminate()
        try:
            await self._wait_for_end(STOP_LIMIT_S)
        finally:
            process.kill()  # no signal if it has ended
            process.wait()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise UsageError("this Node is not started: use `async with`, or await its start()")
        return self._process

    async def _read_status(self) -> Status | None:
        try:
            return await asyncio.to_thread(read_status, Home(self.home))
        except FtisError as error:
            log.info("status of the node unavailable, next try follows: %s", error)
            return None

    async def _wait_for_end(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self.exit_code is None and (left_s := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(POLL_S, left_s))  # a thread in Popen.wait cannot be canceled

    def _raise_failure(self) -> None:
        code = self.exit_code
        if not code or self._is_asked_to_stop:
            return
        assert self._reader is not None
        self._reader.join(DRAIN_LIMIT_S)
        cause = f"exit code {code}" if code > 0 else f"signal {-code}"
        last = self._lines[-1] if self._lines else "it wrote no line"
        raise ERRORS.get(code, FtisError)(f"the node of {self.home} ended with {cause}: {last}")


def _as_words(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else [OFF[name]] if name in OFF else []
        elif isinstance(value, (list, tuple)):
            words += [f"{flag}={one}" for one in value]
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def _launched(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ftis_node", "join", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt of a notebook's cell goes to the kernel's process group alone
    )


def _drain(stream: IO[str], lines: deque[str]) -> None:
    with stream:
        for line in stream:
            if line := line.rstrip():
                lines.append(line)
                log.info("%s", line)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that is still running, and reap it. An interrupt kills it at once."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
    finally:
        process.kill()  # no signal if it has ended
        process.wait()
