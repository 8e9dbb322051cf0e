"""The preloading process: `python -m ftis_node.workers.fork_server`, started by `preload.PreloadingProcess`.

It imports the given modules, then forks a worker for each request on its socket, and ends with that socket or with its
owner. It has one thread, because only that one exists after a fork.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ftis_node.models import skip_unused_packages
from ftis_node.workers.liveness import ORPHAN_EXIT_CODE, PR_SET_PDEATHSIG
from ftis_node.workers.preload import LOADED
from ftis_node.workers.wire import ForkRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_REQUEST_BYTES = 1 << 18
HAS_THREADS_EXIT_CODE = 3
POLL_S = 0.001
# mallopt's parameters, from <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
MAX_MMAP_THRESHOLD = 32 << 20  # mallopt refuses more
NEVER_TRIM = -1


def main() -> None:
    parser = argparse.ArgumentParser(description="Forks the workers of ftis-node; started by its daemon, not by hand.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--padding", help="makes the command line long enough for a worker's")
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != options.owner_pid:
        os._exit(ORPHAN_EXIT_CODE)
    preload(options.modules)
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        sys.stderr.write(f"{num_threads} threads run after the imports: no fork\n")
        sys.exit(HAS_THREADS_EXIT_CODE)
    gc.collect()
    gc.freeze()  # a collection in a worker would write to all shared pages
    with socket.socket(fileno=options.socket) as channel:
        serve(channel, owner_pid=options.owner_pid)


def preload(modules: Sequence[str]) -> None:
    """Import the modules. A module that is missing is left to the workers, which report it."""
    skip_unused_packages()
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            sys.stderr.write(f"not preloaded: {error}\n")


def serve(channel: socket.socket, *, owner_pid: int) -> None:
    """Fork a worker for each request, until the other end is closed."""
    channel.send(LOADED)
    while True:
        request, files, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 1)
        if not request:
            return
        fork = msgspec.msgpack.decode(request, type=ForkRequest)
        pid = fork_worker(fork, log_file=files[0], channel=channel, owner_pid=owner_pid)
        os.close(files[0])
        channel.send(msgspec.msgpack.encode(pid))


def fork_worker(request: ForkRequest, *, log_file: int, channel: socket.socket, owner_pid: int) -> int:
    """Fork a worker that is a child of the owner. Return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        worker = os.fork()
        if worker:
            os.write(writer, str(worker).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        channel.close()
        run(request, log_file=log_file, parent_pid=between, owner_pid=owner_pid)
    os.close(writer)
    with os.fdopen(reader) as answer:
        pid = int(answer.read())
    os.waitpid(between, 0)  # the worker is the owner's child from now on
    return pid


def run(request: ForkRequest, *, log_file: int, parent_pid: int, owner_pid: int) -> None:
    """Run the worker's module as a spawned process would. Does not return."""
    try:
        while (parent := os.getppid()) == parent_pid:
            time.sleep(POLL_S)
        if parent != owner_pid:
            os._exit(ORPHAN_EXIT_CODE)
        os.setsid()
        for standard_file in (1, 2):
            os.dup2(log_file, standard_file)
        os.close(log_file)
        os.environ.clear()
        os.environ.update(request.environment)
        set_allocator(request.environment)
        show_command_line((sys.executable, "-m", *request.command))
        module, *arguments = request.command
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a worker that ends well has ended the process before


def set_allocator(environment: Mapping[str, str]) -> None:
    """Set what glibc reads from MALLOC_... variables at the start of a process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if (arenas := environment.get("MALLOC_ARENA_MAX")) is not None:
        mallopt(M_ARENA_MAX, int(arenas))
    if (trim := environment.get("MALLOC_TRIM_THRESHOLD_")) is not None:
        mallopt(M_TRIM_THRESHOLD, int(trim) if int(trim) < 1 << 31 else NEVER_TRIM)
    if (mapped := environment.get("MALLOC_MMAP_THRESHOLD_")) is not None:
        is_possible = int(mapped) <= MAX_MMAP_THRESHOLD
        mallopt(*((M_MMAP_THRESHOLD, int(mapped)) if is_possible else (M_MMAP_MAX, 0)))


def show_command_line(command: Sequence[str]) -> None:
    """Replace what `ps` shows. The new command line must not be longer than that of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    text = b"\0".join(os.fsencode(word) for word in command) + b"\0"
    if len(text) <= end - start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    main()
