"""A blocked event loop and a stuck task are reported by name with a stack. A task that waits for work is not."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.observe import ObserveSection
from ftis_node.node.supervision.task_monitor import TaskMonitor, stack_of, waiting_for
from ftis_node.node.supervision.watchdog import ALIVE, BEAT_S, ServiceManager, Watchdog
from ftis_node.telemetry.events import EventLog, read_events
from tests.node.support import ANY_PORT, started
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAIT_S = 30.0
START_S = 120.0  # of a process on a busy machine
QUICK = ObserveSection.model_construct(event_loop_stall_warn_s=1.0, event_loop_stall_exit_s=1e9, task_stuck_s=1e9)


def read_a_slow_disk(is_reported: Callable[[], object]) -> None:
    """Block until the blocking code is reported."""
    deadline = time.monotonic() + WAIT_S
    while not is_reported() and time.monotonic() < deadline:
        time.sleep(0.02)


async def test_the_code_that_blocks_the_loop_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    watchdog = Watchdog(QUICK, poll_interval_s=0.05)
    watchdog.events = EventLog(path)
    with watchdog.watching():
        await eventually(lambda: watchdog.lag.mean_s is not None)
        read_a_slow_disk(lambda: "read_a_slow_disk" in str(read_events(path, name="loop_blocked")))
        await eventually(lambda: read_events(path, name="loop_turns_again"))
    watchdog.events.close()
    every = read_events(path, name="loop_blocked")  # a busy machine may block it earlier
    named = [event for event in every if any(place.endswith("read_a_slow_disk") for place in event["stack"])]
    assert named, every
    assert named[0]["for_s"] >= QUICK.event_loop_stall_warn_s
    assert (watchdog.lag.longest_s or 0) >= QUICK.event_loop_stall_warn_s - BEAT_S, "the lag does not have it"


async def test_a_loop_that_stays_blocked_ends_the_process() -> None:
    codes: list[int] = []
    settings = ObserveSection.model_construct(
        event_loop_stall_warn_s=1.0, event_loop_stall_exit_s=1.5, task_stuck_s=1e9
    )
    with Watchdog(settings, end_process=codes.append, poll_interval_s=0.05).watching():
        await asyncio.sleep(0)
        read_a_slow_disk(lambda: codes)
    assert codes == [1]


async def _work_on_orders(waiting: asyncio.Queue[int], working: asyncio.Queue[int]) -> None:
    """A loop that may wait for work without a limit. Its work has the board's limit."""
    while True:
        with waiting_for("an order"):
            await waiting.get()
        await _work(working)


async def _work(working: asyncio.Queue[int]) -> None:
    await working.get()


async def test_a_stuck_loop_is_reported_by_name_and_an_idle_one_is_not() -> None:
    board = TaskMonitor(limit_s=100.0)
    board.install()
    waiting: asyncio.Queue[int] = asyncio.Queue(8)
    working: asyncio.Queue[int] = asyncio.Queue(8)
    task = asyncio.create_task(_work_on_orders(waiting, working), name="orders")
    await asyncio.sleep(0)
    for _ in range(100):
        board.tick(5.0)
    assert [(name, state.waits_for, for_s) for name, state, for_s in board.states()] == [("orders", "an order", 500.0)]
    assert board.changes() == ([], []), "a loop without work is reported"
    waiting.put_nowait(1)
    await asyncio.sleep(0)
    board.tick(3600.0)  # the process was stopped for an hour
    assert board.stuck() == []
    for _ in range(20):
        board.tick(5.0)
    ((stuck,), again) = board.changes()
    assert (stuck.name, stuck.waits_for, again) == ("orders", "its own work", [])
    assert [place.split()[-1] for place in stuck.stack] == ["_work_on_orders", "_work", "get"]
    assert "the orders loop is stuck" in str(stuck)
    assert board.changes() == ([], []), "reported twice"
    assert board.stuck(), "not stuck any more"
    working.put_nowait(1)
    await asyncio.sleep(0)
    assert board.changes() == ([], ["orders"])
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert list(board.states()) == [], "an ended task is still listed"


async def test_a_stack_has_all_frames_down_to_the_wait_of_the_task() -> None:
    async def outer() -> None:
        await inner()

    async def inner() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    places = stack_of(task)
    task.cancel()
    assert [place.split()[-1] for place in places] == ["outer", "inner", "wait"]
    assert places[0].startswith("supervision/test_watchdog.py:"), "the path is absolute"


async def test_systemd_gets_signs_of_life_only_while_no_task_is_stuck(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.setblocking(False)
        manager = ServiceManager.from_environment({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1"})
        assert manager is not None
        settings = ObserveSection.model_construct(
            event_loop_stall_warn_s=100.0, event_loop_stall_exit_s=1e9, task_stuck_s=0.5
        )
        watchdog = Watchdog(settings, manager=manager)
        loop = asyncio.get_running_loop()
        with watchdog.watching():
            with waiting_for("systemd"):
                async with asyncio.timeout(WAIT_S):
                    assert await loop.sock_recv(systemd, 64) == ALIVE
            with waiting_for("an event that never comes", endless=False):
                await eventually(watchdog.board.stuck)
                _drain(systemd)
                await asyncio.sleep(1.2)  # two beats
                assert _drain(systemd) == 0
            with waiting_for("systemd"):
                async with asyncio.timeout(WAIT_S):
                    assert await loop.sock_recv(systemd, 64) == ALIVE, "no sign of life after the task continued"


def test_systemd_gets_signs_of_life_of_a_bootstrap_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.settimeout(START_S)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        with started(tmp_path / "bootstrap", "bootstrap", "--listen", ANY_PORT):
            assert systemd.recv(64) == ALIVE


def _drain(receiver: socket.socket) -> int:
    count = 0
    with suppress(BlockingIOError):
        while receiver.recv(64):
            count += 1
    return count


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid() + 1)},
    ],
)
def test_without_a_watchdog_nothing_is_sent(environment: dict[str, str]) -> None:
    assert ServiceManager.from_environment(environment) is None
