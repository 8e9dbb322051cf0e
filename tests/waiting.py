"""Wait for a condition that another task, thread or process makes true without setting an event."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

WITHIN_S = 40.0
EVERY_S = 0.02


async def eventually(condition: Callable[[], Any | Awaitable[Any]], *, within_s: float = WITHIN_S) -> Any:
    """Wait until `condition` holds and return its value. Raises AssertionError with its source after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, _failure(condition, within_s)
        await asyncio.sleep(EVERY_S)


def wait_until(condition: Callable[[], Any], *, within_s: float = WITHIN_S) -> Any:
    """Block until `condition` holds and return its value. Raises AssertionError with its source after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, _failure(condition, within_s)
        time.sleep(EVERY_S)
    return value


def _failure(condition: Callable[[], Any], within_s: float) -> str:
    try:
        source = inspect.getsource(condition).strip()
    except (OSError, TypeError):  # a function in C, or code without a file
        source = repr(condition)
    return f"not within {within_s:g} s: {source}"
