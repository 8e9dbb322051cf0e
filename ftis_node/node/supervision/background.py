"""Cancellation of work: blocking work that is abandoned, and work that must complete.

At exit, Python waits for the threads of asyncio's default executor, so a long download would keep a stopped node
alive. It does not wait for daemon threads.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
R = TypeVar("R")


class DiskThread:
    """Single-thread executor that runs calls in the order of submission."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")

    async def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function` in the thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Wait for the calls in progress, and stop the thread."""
        self._thread.shutdown(wait=True)


async def in_background(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of `function`, run in a daemon thread; when canceled, abandon the thread."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # None only together with an error

    def work() -> None:
        try:
            result, error = function(*args, **kwargs), None
        except BaseException as caught:
            result, error = None, caught
        with suppress(RuntimeError):  # the loop is closed: no task waits for the result
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=getattr(function, "__name__", "background"), daemon=True).start()
    return await outcome


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
