"""A process that imports torch and transformers once, and forks both workers: `python -m ftis_node.workers.preload`.

    daemon --spawns--> preloading process --imports, forks twice--> the first process of each worker; then it ends

It imports while the daemon prepares the start. Each fork goes through a process that ends at once, so that the kernel
gives the worker to the daemon as a child (PR_SET_CHILD_SUBREAPER). The daemon supervises it as a spawned worker.
Nothing is forked if an import has started a thread or CUDA. Then, and at each restart, workers are spawned.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ftis_node.config.no_network_env import NO_TELEMETRY, WORKERS_STAY_OFFLINE
from ftis_node.errors import FtisError
from ftis_node.files import open_to_write
from ftis_node.workers.liveness import ORPHAN_EXIT_CODE, die_with_parent
from ftis_node.workers.quick_imports import import_quickly

log = logging.getLogger(__name__)

MODULE = "ftis_node.workers.preload"
WORKER_IMPORTS = ("ftis_node.learner.learner", "transformers.models.auto.modeling_auto", "ftis_node.workers.worker")
PR_SET_CHILD_SUBREAPER = 36  # from <sys/prctl.h>
LOADED = b"0\n"
NUM_WORKERS = 2
LOAD_TIMEOUT_S, FORK_TIMEOUT_S = 300.0, 30.0
POLL_S = 0.001
COMMAND_BYTES = 512  # of the process's command line, which a worker replaces by its own
AT_IMPORT = {  # read by libraries at their import, unless the user set them
    "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would start at its import, and no worker needs them
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a learner that compiles, and vLLM, use the same
    "TQDM_DISABLE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # finds a GPU without the driver, which cannot be used after a fork
}
DRIVERS = ("/dev/nvidia-uvm", "/dev/dxg", "/dev/kfd")  # open in a process that has started CUDA
KEPT_BYTES = str(1 << 40)  # above any block size
KEEPS_FREED_BLOCKS: Final = {  # glibc neither trims freed memory nor maps single blocks
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": KEPT_BYTES,
    "MALLOC_MMAP_THRESHOLD_": KEPT_BYTES,
}
MALLOPT = ((-8, 1), (-1, -1), (-4, 0))  # the same after glibc's start: M_ARENA_MAX, M_TRIM_THRESHOLD, M_MMAP_MAX


class ForkedProcess:
    """A child that this process inherited: the part of `asyncio.subprocess.Process` that supervision uses."""

    def __init__(self, pid: int) -> None:
        """Raise ChildProcessError if `pid` is no child of this process."""
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """Return the exit code; negative for a signal."""
        return await asyncio.shield(self._exited)

    def send_signal(self, number: signal.Signals, /) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._exited.set_result(self.returncode)


class Preload:
    """The daemon's side: `begin`, `until_loaded`, `fork` for each worker, `close`. After a failure workers are spawned.

    `environment` has the variables that libraries read at their import, which are equal in both workers.
    """

    def __init__(
        self, environment: Mapping[str, str], log_path: Path, *, modules: Sequence[str] = WORKER_IMPORTS
    ) -> None:
        self._modules = modules
        self._environment = environment
        self._log_path = log_path
        self._loading: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = asyncio.Lock()
        self._num_forked = 0

    def begin(self) -> None:
        """Start the process. An error is logged."""
        try:
            os.close(os.pidfd_open(os.getpid()))  # some builds, kernels and containers have none
            self._process = self._start()
            self._loading = asyncio.create_task(self._load(self._process), name="preload")
        except (OSError, AttributeError, FtisError) as error:
            log.warning("each worker imports its libraries: %s", error)

    async def until_loaded(self) -> None:
        """Return when workers can be forked, or when it is known that they cannot."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    async def fork(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> ForkedProcess | None:
        """Return a new worker process; None if it must be spawned. `command`: python, "-m", the module, arguments."""
        async with self._lock:
            if self._process is None:
                return None
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps([command, environment, str(log_path)]).encode() + b"\n")
                self._process.stdin.flush()
                forked = ForkedProcess(int(await _reply(self._process, FORK_TIMEOUT_S)))
            except (OSError, ValueError, TimeoutError) as error:
                log.warning("a worker cannot be forked (%s: %s): it is spawned", type(error).__name__, error)
                self.close()
                return None
            self._num_forked += 1
            if self._num_forked == NUM_WORKERS:
                self.close()
            return forked

    def close(self) -> None:
        """End the process, if it runs. Workers that it forked continue: each has its own process group."""
        if (process := self._process) is None:
            return
        self._process = None
        try:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(BrokenPipeError), process:  # a request that it did not read is still in the buffer
                pass
        finally:
            _set_subreaper(False)

    async def _load(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has imported its modules. If that fails, end it."""
        with suppress(TimeoutError, ValueError):  # `close` closes the pipe
            if await _reply(process, LOAD_TIMEOUT_S) == LOADED:
                return
        if self._process is not None:
            log.warning("each worker imports its libraries, because none can be forked: see %s", self._log_path)
            self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        _set_subreaper(True)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {**AT_IMPORT, **os.environ, **NO_TELEMETRY, **WORKERS_STAY_OFFLINE, **self._environment}
        with os.fdopen(open_to_write(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as own_log:
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, str(os.getpid()), "." * COMMAND_BYTES, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=own_log,
                env=environment,
                start_new_session=True,
            )


async def _reply(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(timeout_s):
        return await asyncio.to_thread(process.stdout.readline)


def _set_subreaper(value: bool) -> None:
    """Make the kernel give orphaned descendants to this process, or to the usual one. Raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def serve(owner_pid: int, modules: Sequence[str]) -> None:
    """Import the modules, then fork a worker for each request on stdin. Returns when the owner closes it."""
    die_with_parent()
    if os.getppid() != owner_pid:
        sys.exit(ORPHAN_EXIT_CODE)
    replies = os.dup(1)
    os.dup2(2, 1)  # libraries may print while they are imported
    for name in modules:
        import_quickly(name)
    if obstacle := _obstacle():
        sys.exit(f"{obstacle} after the imports: no worker is forked")
    os.write(replies, LOADED)
    for request in sys.stdin.buffer:
        command, environment, log_path = json.loads(request)
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            try:
                between = os.getpid()
                if os.fork() == 0:
                    os.close(reader)
                    os.close(replies)
                    _become(command, environment, log_path, parents=(between, owner_pid), started=writer)
            finally:
                os._exit(0)
        os.waitpid(between, 0)  # from now on the worker is the owner's child
        os.close(writer)
        os.write(replies, os.read(reader, 32) or b"no worker\n")
        os.close(reader)


def _obstacle() -> str | None:
    """Return why a child could not use what this process has imported."""
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{num_threads} threads run"
    with os.scandir("/proc/self/fd") as descriptors:
        opened = {os.readlink(each.path) for each in descriptors if each.is_symlink()}
    return next((f"{path} is open" for path in opened if path.startswith(DRIVERS)), None)


def _become(
    command: Sequence[str], environment: Mapping[str, str], log_path: str, *, parents: tuple[int, int], started: int
) -> None:
    """Run the module of `command`, as a spawned process would. Does not return.

    It writes its pid to `started` once it is the owner's child, with a process group that can be killed.
    """
    try:
        between, owner = parents
        while (parent := os.getppid()) == between:
            time.sleep(POLL_S)
        if parent != owner:
            os._exit(ORPHAN_EXIT_CODE)
        os.setsid()
        os.write(started, b"%d\n" % os.getpid())
        os.close(started)
        nothing = os.open(os.devnull, os.O_RDONLY)
        own_log = open_to_write(Path(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for source, target in ((nothing, 0), (own_log, 1), (own_log, 2)):
            os.dup2(source, target)
        os.close(nothing)
        os.close(own_log)
        os.environ.clear()
        os.environ.update(environment)
        if environment.items() >= KEEPS_FREED_BLOCKS.items() and hasattr(libc := ctypes.CDLL(None), "mallopt"):
            for parameter, value in MALLOPT:
                libc.mallopt(parameter, value)
        _show(command)
        _, _, module, *arguments = command
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # a worker that ends well has ended the process before


def _show(command: Sequence[str]) -> None:
    """Replace this process's command line, which `ps` shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[3:])
