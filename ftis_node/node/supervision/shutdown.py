"""Shutdown of a long-running command on a signal or an error.

A signal is a clean end. Of several errors, the first FtisError is raised. An error in a task that no code awaits also
stops the command like a signal, and is raised after everything is saved. A shutdown that takes too long is forced.

A checkpoint of a large model takes minutes, a computation on a slow machine many seconds. `delay_forced_end` then moves
the deadline, and a second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ftis_node.errors import FtisError
from ftis_node.telemetry.faults import OnFault, unhandled_errors

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal or the SSH session is closed
STOP_LIMIT_S = 60.0  # each slow component has a separate, shorter limit
STOP_POLL_S = 0.5
SLOW_STOP_S = 3.0  # then the user learns what the stop waits for; until then a second signal may be a copy of the first
FORCED_EXIT_CODE = 1
_ending: ContextVar[_Ending | None] = ContextVar("ending", default=None)


async def until_signalled(
    work: Coroutine[None, None, None], *, on_fault: OnFault | None = None, stop_limit_s: float = STOP_LIMIT_S
) -> None:
    """Await `work`; a signal of `STOP_SIGNALS` cancels it. Raise its error, or one exception of an exception group.

    An error in a task that no code awaits (`telemetry/faults.py`) also cancels it, and is raised after a call of
    `on_fault`.
    """
    ending = _Ending(stop_limit_s=stop_limit_s)
    _ending.set(ending)  # for the tasks of `work`
    ending.task = task = asyncio.create_task(work, name="node")

    def fail(where: str, error: BaseException) -> None:
        ending.fault = error
        ending.begin(f"{where} failed ({type(error).__name__}: {error})")
        if on_fault is not None:
            on_fault(where, error)

    with ending.by_signals(), unhandled_errors(fail):
        try:
            await task
        except asyncio.CancelledError:
            if not ending.has_begun:
                raise
        except BaseExceptionGroup as group:
            raise first_of_ours(group) from group
    if ending.fault is not None:
        raise first_of_ours(ending.fault)


def delay_forced_end(what: str) -> None:
    """Report that a stop waits for `what`: from now on it has its full time limit again.

    Before a stop, and in a process without `until_signalled`, this does nothing.
    """
    ending = _ending.get()
    if ending is not None and ending.has_begun:
        ending.delay(what)


def stop_waits_for() -> str:
    """Return what a stop waits for, as `delay_forced_end` reported it last; "" before any report."""
    ending = _ending.get()
    return "" if ending is None else ending.waits_for


class _Ending:
    task: asyncio.Task[None]

    def __init__(self, *, stop_limit_s: float) -> None:
        self._limit_s = stop_limit_s
        self._began_at = 0.0
        self._left_s = stop_limit_s
        self._logged = ""
        self.waits_for = ""
        self._is_over = threading.Event()
        self.has_begun = False
        self.fault: BaseException | None = None

    def begin(self, why: str) -> None:
        if not self.has_begun:
            log.info("%s: stopping", why)
            self.has_begun = True
            self._began_at = time.monotonic()
            threading.Thread(target=self._watch, name="stop-deadline", daemon=True).start()
            self.task.cancel()

    def delay(self, what: str) -> None:
        """Move the deadline. In a slow stop, log what it waits for, and let the next signal end the process."""
        self._left_s, self.waits_for = self._limit_s, what
        if self._logged != what and time.monotonic() - self._began_at >= SLOW_STOP_S:
            self._logged = what
            again = "ctrl-C again ends the node without it, and the next start resumes from an older checkpoint"
            log.info("stopping: waiting for %s; %s", what, again)

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Cancel the task on a signal of `STOP_SIGNALS`. A process that `nohup` started continues to ignore SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._take_signal, number.name)
        try:
            yield
        finally:
            self._is_over.set()

    def _take_signal(self, name: str) -> None:
        if self._logged:
            log.error("%s: ended without waiting for %s; the next start resumes from disk", name, self._logged)
            os._exit(FORCED_EXIT_CODE)
        self.begin(name)

    def _watch(self) -> None:
        """End the process by force after the limit, counted in polls: a suspended process makes none."""
        while self._left_s > 0:
            if self._is_over.wait(poll_s := min(STOP_POLL_S, self._limit_s / 10)):
                return
            self._left_s -= poll_s
        _force_end(self.task.get_loop(), time.monotonic() - self._began_at)


def _force_end(loop: asyncio.AbstractEventLoop, after_s: float) -> None:
    """Log the tasks that the event loop waits for, then exit at once. The workers and p2pd end with this process."""
    for task in asyncio.all_tasks(loop):
        log.error("the shutdown waits for the task %s: %s", task.get_name(), " > ".join(stack_of(task)))
    log.error("not stopped within %.0f s: ended by force; the next start resumes from disk", after_s)
    os._exit(FORCED_EXIT_CODE)


def stack_of(task: asyncio.Task[Any]) -> list[str]:
    """Return the stack of a suspended task, the innermost frame last: `loops/intake.py:97 _judge_all`.

    `Task.get_stack` returns only the outermost frame. So follow the attribute that references the awaited coroutine.
    """
    places: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = "cr" if hasattr(awaited, "cr_frame") else "gi" if hasattr(awaited, "gi_frame") else "ag"
        frame = getattr(awaited, f"{kind}_frame", None)
        if frame is not None:
            places.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return places


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else "/".join(path.parts[-2:])


def first_of_ours(error: BaseException) -> BaseException:
    """Return the first FtisError in a tree of exceptions, else the first exception."""
    if isinstance(error, BaseExceptionGroup):
        error = error.subgroup(FtisError) or error
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
