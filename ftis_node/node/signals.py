"""Signals and errors of a long-running command: a signal is a good end, of several errors the first of ours counts."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from collections.abc import Coroutine

log = logging.getLogger(__name__)


async def until_signalled(work: Coroutine[None, None, None]) -> None:
    """Awaits `work`; SIGINT and SIGTERM cancel it. Raises what it raised, one exception of a group."""
    task = asyncio.create_task(work, name="node")
    loop = asyncio.get_running_loop()
    signalled = False

    def stop(name: str) -> None:
        nonlocal signalled
        if not signalled:
            log.info("%s: stopping", name)
            signalled = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number.name)
    try:
        await task
    except asyncio.CancelledError:
        if not signalled:
            raise
    except BaseExceptionGroup as group:
        raise _first_of_ours(group) from group


def _first_of_ours(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first FtisError in a tree of exceptions, else the first exception."""
    flat: list[BaseException] = []
    queue: list[BaseException] = [group]
    while queue:
        error = queue.pop(0)
        if isinstance(error, BaseExceptionGroup):
            queue.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, FtisError)), flat[0])
