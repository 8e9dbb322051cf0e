"""Waits for work and events: what a cancellation of the caller abandons, and what still runs to its end.

At exit, Python waits for the threads of asyncio's default executor, so a long download would keep a stopped node alive.
It does not wait for daemon threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_background(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of `function`, run in a daemon thread; when canceled, abandon the thread."""
    outcome: Future[R] = Future()

    def work() -> None:
        if outcome.set_running_or_notify_cancel():
            try:
                outcome.set_result(function(*args, **kwargs))
            except BaseException as error:
                outcome.set_exception(error)

    threading.Thread(target=work, name=getattr(function, "__name__", "background"), daemon=True).start()
    return await asyncio.wrap_future(outcome)


async def to_the_end(work: Coroutine[None, None, R]) -> R:
    """Return the result of `work`. A cancellation takes effect after the work; a second one takes effect at once.

    Raise the error of the work, even if the caller is canceled.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled() and (error := running.exception()) is not None:
            raise error from None
        raise


async def wait_at_most(limit_s: float | None, event: asyncio.Event) -> None:
    """Wait until `event` is set, for `limit_s` at most; None: without a limit."""
    with suppress(TimeoutError):  # Python 3.11's `wait_for` loses a cancellation that coincides with the event
        async with asyncio.timeout(limit_s):
            await event.wait()
