"""An error that nobody waits for is a fault where it passed through our code, wherever it happens; once is enough."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ftis_node.errors import ConfigError
from ftis_node.gossip.multiaddr import parse_multiaddr
from ftis_node.telemetry.faults import unhandled_errors, watched_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

WAIT_S = 20.0


class Faults:
    """What was heard, and a wait for it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, BaseException]] = []
        self._came = asyncio.Event()

    def take(self, where: str, error: BaseException) -> None:
        self.heard.append((where, error))
        self._came.set()

    async def wait(self) -> tuple[str, BaseException]:
        async with asyncio.timeout(WAIT_S):
            await self._came.wait()
        return self.heard[0]


@contextmanager
def heard_faults() -> Iterator[Faults]:
    faults = Faults()
    with unhandled_errors(faults.take):
        yield faults


def fail_in_our_code() -> None:
    parse_multiaddr("nonsense")


def fail_elsewhere() -> None:
    raise LookupError("a library's")


async def _later(failing: Callable[[], None]) -> None:
    await asyncio.sleep(0)
    failing()


async def test_a_task_that_nobody_awaits() -> None:
    with heard_faults() as faults:
        task = asyncio.create_task(_later(fail_in_our_code), name="orphan")
        await asyncio.wait({task})
        del task
        gc.collect()
        where, error = await faults.wait()
    assert where == "the task orphan"
    assert isinstance(error, ConfigError)


async def test_a_callback_of_something_that_ended_well() -> None:
    with heard_faults() as faults:
        ended = asyncio.create_task(asyncio.sleep(0))
        ended.add_done_callback(lambda _: fail_in_our_code())
        await ended
        where, error = await faults.wait()
    assert where.startswith("the event loop")
    assert isinstance(error, ConfigError)


async def test_a_thread() -> None:
    with heard_faults() as faults:
        threading.Thread(target=fail_in_our_code, name="reader").start()
        where, error = await faults.wait()
    assert where == "the thread reader"
    assert isinstance(error, ConfigError)
    assert threading.excepthook is threading.__excepthook__ or not faults.heard[1:], "the hook was given back"


async def test_a_watched_task_that_still_has_its_owner() -> None:
    """A reader that nobody asks: it fails at once, not when it is collected, and whoever raised."""
    with heard_faults() as faults:
        kept = watched_task(_later(fail_elsewhere), name="p2pd-output")
        assert await faults.wait() == ("the task p2pd-output", kept.exception())


async def test_the_first_fault_ends_the_node_and_a_librarys_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with heard_faults() as faults:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            loop.call_soon(fail_elsewhere)
        await asyncio.sleep(0.05)
        assert faults.heard == []
        loop.call_soon(fail_in_our_code)
        loop.call_soon(fail_in_our_code)
        await faults.wait()
        await asyncio.sleep(0)
    assert len(faults.heard) == 1
    told = [record for record in caplog.records if "a library failed" in record.message]
    assert len(told) == 1, "once for each kind"
