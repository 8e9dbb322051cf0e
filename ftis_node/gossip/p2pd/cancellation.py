"""Await a coroutine that may swallow a cancellation (CPython issue 86296).

Before Python 3.12 `asyncio.wait_for` loses a cancellation that arrives just when the awaited call finishes:
https://github.com/python/cpython/issues/86296. hivemind waits for each peer's answer in this way. A task that awaits
hivemind and is canceled at that moment continues to run, and the task that waits for its end hangs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

CANCEL_AGAIN_S = 1.0  # wait before a task that has not ended is canceled again


async def shielded_call(work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """Return the result of `work`, run in its own task. If this call is canceled, that task is not awaited.

    Raises TimeoutError after `timeout_s`, and what `work` raises.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_consume_error)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks repeatedly until they have ended; ignore their results."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        _consume_error(task)


def _consume_error(task: asyncio.Task[Any]) -> None:
    """Retrieve the task's error, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()
