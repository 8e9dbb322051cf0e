"""The record of a worker's process, its time limits, its socket, and the process that forks it.

    daemon --spawns--> preloading process (`fork_server.py`) --imports, forks twice--> both workers; then it ends

torch and transformers take seconds of processor time to import. Two workers that start together need this once. The
memory of the imported code is shared until a process writes to it.

The preloading process forks each worker through a process in between, which ends at once. The kernel gives the worker
to the daemon as a child (`PR_SET_CHILD_SUBREAPER`). So supervision is the same as for a spawned worker: exit status,
signals, process group, parent-death signal, log and environment. A restart spawns the worker as usual.

After any failure `fork` returns None, and the worker is spawned as usual. Libraries must not have started
threads before the fork, and CUDA cannot be used after one: only workers on the CPU are forked.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ftis_node.config.no_network_env import NO_TELEMETRY, WORKERS_STAY_OFFLINE
from ftis_node.errors import ConfigError
from ftis_node.files import open_to_write
from ftis_node.workers.liveness import Liveness

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from signal import Signals

    from ftis_node.workers.wire import Message

SCHEME = "ipc://"
MAX_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes with the final zero; zmq's error does not name the path
log = logging.getLogger(__name__)
SERVER_MODULE = "ftis_node.workers.fork_server"
PR_SET_CHILD_SUBREAPER = 36  # from <sys/prctl.h>
LOADED = b"loaded\n"
LOAD_TIMEOUT_S = 300.0
FORK_TIMEOUT_S = 30.0
COMMAND_BYTES = 512  # of the server's command line, which a worker replaces by its own
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's threads would start at its import, and no worker needs them


def endpoint_in(sockets_dir: Path, *, name: str) -> str:
    """Return a zmq endpoint in `sockets_dir`, and create that folder if missing. Raises ConfigError for a path that is
    too long.
    """
    path = Path(sockets_dir).absolute() / f"{name}.sock"
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} is {num_bytes} bytes long, the system's limit is {MAX_SOCKET_PATH_BYTES}: "
            "choose a home with a shorter path"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return f"{SCHEME}{path}"


def remove_socket(endpoint: str) -> None:
    """Remove an endpoint's socket file, which zmq does not remove."""
    Path(endpoint.removeprefix(SCHEME)).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The process to spawn: `python -m module`. `boot` is the first message that it receives.

    `environment` is added to the daemon's environment. The first process is forked from `preloading` if that is
    possible.
    """

    name: str
    module: str
    boot: Message
    sockets_dir: Path
    log_path: Path
    event_types: tuple[type[Message], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    preloading: PreloadingProcess | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds. With `stall_timeout_s` None a request may take any time.

    After `Stop` a worker has `stop_grace_s` to end, or `stop_grace_factor` times its longest time without progress if
    that is more. Each progress that it reports begins this time again, up to `save_limit_s` in all.
    """

    start_grace_s: float = 900.0
    heartbeat_every_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    stall_timeout_s: float | None = None
    stop_grace_s: float = 4.0
    stop_grace_factor: float = 2.0
    save_limit_s: float = 0.0
    terminate_grace_s: float = 1.0

    def liveness(self) -> Liveness:
        stall_timeout_s = self.stall_timeout_s
        return Liveness(
            max_silent_ticks=max(1, round(self.heartbeat_timeout_s / self.heartbeat_every_s)),
            max_stalled_ticks=None
            if stall_timeout_s is None
            else max(1, round(stall_timeout_s / self.heartbeat_every_s)),
        )


class ProcessHandle(Protocol):
    """What the owner of a child process can do with it."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: Signals, /) -> None: ...


class ForkedProcess:
    """A child process that this process inherited, with the part of `asyncio.subprocess.Process` that is used.

    Its end is awaited through a pidfd, and its exit status is collected at once.
    """

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
        if self.returncode is None:
            os.kill(self.pid, signal)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._exited.set_result(self.returncode)


@dataclass(slots=True)
class PreloadingProcess:
    """The daemon's side: `begin`, `until_loaded`, then `fork` once for each of `num_workers`; the process then ends.

    `environment` holds the variables that libraries read when they are imported.
    """

    modules: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    num_workers: int = 2
    _process: asyncio.subprocess.Process | None = None
    _loading: asyncio.Task[None] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_closed: bool = False

    def begin(self) -> None:
        """Start the process, if it has not started."""
        if self._loading is None and not self._is_closed:
            self._loading = asyncio.create_task(self._load(), name="preload")

    async def until_loaded(self) -> None:
        """Return when workers can be forked, or when it is known that they cannot. If canceled, end the process."""
        self.begin()
        if self._loading is None:
            return
        try:
            await asyncio.wait({self._loading})
        except asyncio.CancelledError:
            await self.close()
            raise

    async def fork(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> ForkedProcess | None:
        """Return a new worker process; None if it must be spawned. `command` is python, "-m", module, arguments."""
        async with self._lock:
            if self._is_closed or self._process is None:
                return None
            requests, replies = self._process.stdin, self._process.stdout
            assert requests is not None and replies is not None
            try:
                async with asyncio.timeout(FORK_TIMEOUT_S):
                    requests.write(json.dumps([command[2:], dict(environment), str(log_path)]).encode() + b"\n")
                    await requests.drain()
                    forked = ForkedProcess(int(await replies.readline()))
            except (OSError, ValueError, TimeoutError) as error:
                log.warning("a worker cannot be forked (%s: %s): it is spawned", type(error).__name__, error)
                await self.close()
                return None
            except asyncio.CancelledError:
                await self.close()  # the reply to this request would be taken for that to the next
                raise
            self.num_workers -= 1
            if self.num_workers == 0:
                await self.close()
            return forked

    async def close(self) -> None:
        """End the process, if it runs. Workers that it forked continue."""
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            await asyncio.wait({self._loading})
        await self._end()

    async def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        _set_subreaper(False)

    async def _load(self) -> None:
        """Start the process and wait until it has imported its modules. If that fails, end it."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                self._process = await self._start()
                assert self._process.stdout is not None
                reply = await self._process.stdout.readline()
            if reply == LOADED:
                return
            log.warning("the preloading process ended early: each worker imports its libraries; see %s", self.log_path)
        except (OSError, TimeoutError) as error:
            log.warning("the preloading process failed (%s): each worker imports its libraries", error or "time limit")
        await self._end()

    async def _start(self) -> asyncio.subprocess.Process:
        _set_subreaper(True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        words = ("--owner-pid", str(os.getpid()), *self.modules)
        padding = "." * max(1, COMMAND_BYTES - len(" ".join(words)))
        with os.fdopen(open_to_write(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as server_log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", SERVER_MODULE, "--padding", padding, *words),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=server_log,
                env={**ONE_THREAD, **os.environ, **NO_TELEMETRY, **WORKERS_STAY_OFFLINE, **self.environment},
                start_new_session=True,
            )


def can_fork() -> bool:
    """Return whether this system has what forked workers need: pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _set_subreaper(value: bool) -> None:
    """Make the kernel give orphaned descendants to this process, or to the usual one. Raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
