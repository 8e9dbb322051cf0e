"""Waiting for work that may not hear that it is cancelled.

Until Python 3.12 `asyncio.wait_for` loses a cancellation that comes in the moment in which what it waits for is done:
https://github.com/python/cpython/issues/86296. hivemind waits so for each answer of a peer. Whoever awaits hivemind
and is cancelled just then goes on as if nothing had been said, and whoever waits for that one's end waits for ever.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

CANCEL_AGAIN_S = 1.0  # then a task that was told to end is told again


async def shielded_call(work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """What `work` returns, done in a task of its own, which is left to itself when this call is cancelled.

    Raises TimeoutError after `timeout_s`, and what `work` raises.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_heard)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks, and again until they have ended; how they did is not told."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        _heard(task)


def _heard(task: asyncio.Task[Any]) -> None:
    """An error that nobody asks for is no news."""
    if not task.cancelled():
        task.exception()
