"""The preloading process: `python -m ftis_node.workers.fork_server`, started by `preload.PreloadingProcess`.

It imports the given modules. Then it reads a request from each line of its standard input, forks a worker, and writes
the worker's process id to its standard output. It ends with its input or with its owner. It has one thread, because
only that one exists after a fork.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.files import open_to_write
from ftis_node.models import skip_unused_packages
from ftis_node.workers.liveness import ORPHAN_EXIT_CODE, PR_SET_PDEATHSIG
from ftis_node.workers.preload import LOADED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HAS_THREADS_EXIT_CODE = 3
POLL_S = 0.001
# mallopt's parameters, from <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
MAX_MMAP_THRESHOLD = 32 << 20  # mallopt refuses more
NEVER_TRIM = -1


def main() -> None:
    parser = argparse.ArgumentParser(description="Forks the workers of ftis-node; started by its daemon, not by hand.")
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--padding", help="makes the command line long enough for a worker's")
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != options.owner_pid:
        os._exit(ORPHAN_EXIT_CODE)
    replies = os.dup(1)
    os.dup2(2, 1)  # libraries may print while they are imported
    preload(options.modules)
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        sys.stderr.write(f"{num_threads} threads run after the imports: no fork\n")
        sys.exit(HAS_THREADS_EXIT_CODE)
    gc.collect()
    gc.freeze()  # a collection in a worker would write to all shared pages
    os.write(replies, LOADED)
    for request in sys.stdin.buffer:
        command, environment, log_path = json.loads(request)
        pid = fork_worker(command, environment, log_path, replies=replies, owner_pid=options.owner_pid)
        os.write(replies, b"%d\n" % pid)


def preload(modules: Sequence[str]) -> None:
    """Import the modules. A module that is missing is left to the workers, which report it."""
    skip_unused_packages()
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            sys.stderr.write(f"not preloaded: {error}\n")


def fork_worker(
    command: Sequence[str], environment: Mapping[str, str], log_path: str, *, replies: int, owner_pid: int
) -> int:
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
        for descriptor in (reader, writer, replies):
            os.close(descriptor)
        run(command, environment, log_path, parent_pid=between, owner_pid=owner_pid)
    os.close(writer)
    with os.fdopen(reader) as answer:
        pid = int(answer.read())
    os.waitpid(between, 0)  # the worker is the owner's child from now on
    return pid


def run(
    command: Sequence[str], environment: Mapping[str, str], log_path: str, *, parent_pid: int, owner_pid: int
) -> None:
    """Run the worker's module as a spawned process would. Does not return."""
    try:
        while (parent := os.getppid()) == parent_pid:
            time.sleep(POLL_S)
        if parent != owner_pid:
            os._exit(ORPHAN_EXIT_CODE)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        worker_log = open_to_write(Path(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for standard_file, source in enumerate((nothing, worker_log, worker_log)):
            os.dup2(source, standard_file)
        os.close(nothing)
        os.close(worker_log)
        os.environ.clear()
        os.environ.update(environment)
        set_allocator(environment)
        show_command_line((sys.executable, "-m", *command))
        module, *arguments = command
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
