"""Errors that no code awaits: one that passed through this package is reported as a fault, once."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ftis_node.errors import ConfigError
from ftis_node.gossip.multiaddr import parse_multiaddr
from ftis_node.telemetry.faults import unhandled_errors, watched_task
from tests.waiting import eventually

WAIT_S = 20.0


class Faults:
    """The reported faults, and a wait for the first one."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, BaseException]] = []
        self._arrived = asyncio.Event()

    def take(self, where: str, error: BaseException) -> None:
        self.reported.append((where, error))
        self._arrived.set()

    async def wait(self) -> tuple[str, BaseException]:
        async with asyncio.timeout(WAIT_S):
            await self._arrived.wait()
        return self.reported[0]


@contextmanager
def collected_faults() -> Iterator[Faults]:
    faults = Faults()
    with unhandled_errors(faults.take):
        yield faults


def fail_in_the_package() -> None:
    parse_multiaddr("nonsense")


def fail_in_a_library() -> None:
    raise LookupError("an error of a library")


async def _later(failing: Callable[[], None]) -> None:
    await asyncio.sleep(0)
    failing()


async def test_an_error_in_a_task_without_an_owner_is_reported():
    with collected_faults() as faults:
        task = asyncio.create_task(_later(fail_in_the_package), name="orphan")
        await asyncio.wait({task})
        del task
        gc.collect()
        where, error = await faults.wait()
    assert where == "the task orphan"
    assert isinstance(error, ConfigError)


async def test_an_error_in_a_done_callback_is_reported():
    with collected_faults() as faults:
        ended = asyncio.create_task(asyncio.sleep(0))
        ended.add_done_callback(lambda _: fail_in_the_package())
        await ended
        where, error = await faults.wait()
    assert where.startswith("the event loop")
    assert isinstance(error, ConfigError)


async def test_an_error_in_a_thread_is_reported_and_the_hook_is_restored():
    before = threading.excepthook
    with collected_faults() as faults:
        threading.Thread(target=fail_in_the_package, name="reader").start()
        where, error = await faults.wait()
    assert where == "the thread reader"
    assert isinstance(error, ConfigError)
    assert threading.excepthook is before


async def test_an_error_in_a_watched_task_is_reported_at_once():
    """The task still has an owner, and the error is of a library. It is not reported only at garbage collection."""
    with collected_faults() as faults:
        kept = watched_task(_later(fail_in_a_library), name="p2pd-output")
        assert await faults.wait() == ("the task p2pd-output", kept.exception())


async def test_the_first_fault_is_reported_and_errors_of_a_library_are_logged_once(caplog):
    with collected_faults() as faults:
        loop = asyncio.get_running_loop()

        def library_errors():
            return [record for record in caplog.records if "a library failed" in record.message]

        for _ in range(3):
            loop.call_soon(fail_in_a_library)
        await eventually(library_errors)
        assert faults.reported == []
        loop.call_soon(fail_in_the_package)
        loop.call_soon(fail_in_the_package)
        await faults.wait()
        await asyncio.sleep(0)
    assert (len(faults.reported), len(library_errors())) == (1, 1)
