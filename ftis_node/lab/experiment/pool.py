"""Calls a function in parallel processes of one core each, and reports the progress of every call."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from multiprocessing.queues import Queue
from typing import Any

from pebble import ProcessExpired, ProcessPool

from ftis_node.errors import FtisError, WorkerDiedError
from ftis_node.workers.liveness import describe_exit, die_with_owner

OnPoll = Callable[[Mapping[str, float], int], None]  # progress by call, and the number of calls left


POLL_S = 0.5
_progress: Queue[tuple[str, float]] | None = None  # set in the processes of the pool


def call_in_processes(
    function: Callable[..., None], calls: Mapping[str, tuple[Any, ...]], *, jobs: int, watch: OnPoll, failure: str
) -> None:
    """Call `function(*arguments)` for each of `calls`, `jobs` at a time, until all have returned or one has failed.

    `watch` is called twice a second. Raises the FtisError of the first failure, or WorkerDiedError with the text
    `failure`.
    """
    spawn = multiprocessing.get_context("spawn")
    reports: Queue[tuple[str, float]] = spawn.Queue()
    progress = dict.fromkeys(calls, 0.0)
    workers = max(1, min(jobs, len(calls)))
    pool = ProcessPool(max_workers=workers, context=spawn, initializer=_enter, initargs=(reports, os.getpid()))
    try:
        waiting: set[Future[None]] = {pool.schedule(function, args=arguments) for arguments in calls.values()}
        while waiting:
            done, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                try:
                    future.result()
                except (FtisError, KeyboardInterrupt):
                    raise
                except ProcessExpired as error:
                    raise WorkerDiedError(f"{failure}: its process {describe_exit(error.exitcode)}") from error
                except Exception as error:
                    raise WorkerDiedError(f"{failure}: {error!r}") from error
            with contextlib.suppress(queue.Empty):
                while True:
                    call, value = reports.get_nowait()
                    progress[call] = value
            watch(progress, len(waiting))
    finally:
        pool.stop()
        pool.join()


def report(call: str, value: float) -> None:
    if _progress is not None:
        _progress.put((call, value))


def _enter(reports: Queue[tuple[str, float]], owner_pid: int) -> None:
    """Initialize a process of the pool: one core, set before torch is imported."""
    global _progress
    die_with_owner(owner_pid)
    _progress = reports
    os.environ["OMP_NUM_THREADS"] = "1"
