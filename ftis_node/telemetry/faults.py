"""Handler of unhandled errors: they end the process with a reason, and never remain a mere log line.

    a task that is not awaited, a callback, a timer --> the loop's exception handler --+
    a thread                                        --> threading.excepthook ----------+--> on_fault(where, error)

An error is a fault if it passed through our code, or if `report` reports it. A part of the process has stopped then,
and no other part notices. Libraries have separate tasks and threads. Those of hivemind serve unknown peers, which must
not be able to end a node. So errors within libraries are only logged, once for each kind. Other checks detect the loss
of such a task: p2pd's connection, heartbeats, time limits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

OnFault: TypeAlias = "Callable[[str, BaseException], None]"
PACKAGE = str(Path(__file__).parents[1])
MAX_KINDS = 64  # kinds of library errors that are logged, once each; further kinds are not logged


def watched_task(work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """Start a task that no code awaits while it runs. Its failure is reported as a fault at once."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(report)
    return task


def report(task: asyncio.Task[Any]) -> None:
    """Report a failed task to the loop's exception handler. Use as a done callback."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "a task failed", "exception": error, "task": task, "is_fault": True}
        task.get_loop().call_exception_handler(context)


@contextmanager
def unhandled_errors(on_fault: OnFault) -> Iterator[None]:
    """Inside the block, call `on_fault` in the loop for a fault in this loop or in any thread.

    It gets the place and the error of the first fault; further ones are logged.
    """
    loop = asyncio.get_running_loop()
    watch = _Watch(on_fault)

    def in_thread(hook: threading.ExceptHookArgs) -> None:
        if hook.exc_value is not None and not isinstance(hook.exc_value, SystemExit):
            where = f"the thread {hook.thread.name if hook.thread else '?'}"
            loop.call_soon_threadsafe(watch.take, where, hook.exc_value, is_ours(hook.exc_value))

    hook_before, handler_before = threading.excepthook, loop.get_exception_handler()
    threading.excepthook = in_thread
    loop.set_exception_handler(watch.take_context)
    try:
        yield
    finally:
        loop.set_exception_handler(handler_before)
        threading.excepthook = hook_before


def is_ours(error: BaseException) -> bool:
    """Return whether an error, or one in an exception group, passed through code of this package."""
    if isinstance(error, BaseExceptionGroup) and any(map(is_ours, error.exceptions)):
        return True
    return any(frame.f_code.co_filename.startswith(PACKAGE) for frame, _ in traceback.walk_tb(error.__traceback__))


class _Watch:
    def __init__(self, on_fault: OnFault) -> None:
        self._on_fault: OnFault | None = on_fault
        self._known: set[tuple[str, str]] = set()

    def take_context(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:  # a warning from asyncio
            log.warning("%s", context["message"])
            return
        self.take(_where(context), error, bool(context.get("is_fault")) or is_ours(error))

    def take(self, where: str, error: BaseException, is_fault: bool) -> None:
        if not is_fault:
            self._report_once(where, error)
            return
        log.error("unhandled error in %s", where, exc_info=error)
        if self._on_fault is not None:
            on_fault, self._on_fault = self._on_fault, None
            on_fault(where, error)

    def _report_once(self, where: str, error: BaseException) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        kind = (type(error).__name__, str([(frame.filename, frame.lineno) for frame in last]))
        if kind not in self._known and len(self._known) < MAX_KINDS:
            self._known.add(kind)
            what = f"{type(error).__name__}: {error}"
            log.warning("a library failed in %s (%s); the node continues and does not log it again", where, what)


def _where(context: dict[str, Any]) -> str:
    task = context.get("task") or context.get("future")
    if isinstance(task, asyncio.Task):
        return f"the task {task.get_name()}"
    return f"the event loop ({context['message']})"
