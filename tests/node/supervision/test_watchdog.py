"""A blocked event loop is reported with its duration. If it stays blocked, the process ends with its stack."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

from ftis_node.node.supervision.watchdog import ALIVE, BEAT_S, Watchdog, service_manager
from ftis_node.telemetry.events import EventLog, read_events
from tests.node.support import ANY_PORT, started
from tests.waiting import eventually

WAIT_S = 30.0
START_S = 120.0  # of a process on a busy machine
WARN_S = 1.0
BLOCKED = """
import asyncio, time
from ftis_node.node.supervision.watchdog import Watchdog

def read_a_slow_disk():
    time.sleep(600)

async def main():
    with Watchdog(warn_s=1, blocked_s=1).watching():
        await asyncio.sleep(1.5)  # longer than the limit: the loop beats
        print("blocked", flush=True)
        read_a_slow_disk()

asyncio.run(main())
"""
STOPPED = """
import asyncio
from ftis_node.node.supervision.watchdog import Watchdog

async def main():
    with Watchdog(warn_s=1, blocked_s=1).watching():
        await asyncio.sleep(0.6)
        print("beats", flush=True)
        await asyncio.sleep(1.6)
        print("ends")

asyncio.run(main())
"""
STOPPED_S = 1.6


def block(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_block_of_the_loop_is_reported_with_its_duration(tmp_path):
    path = tmp_path / "events.jsonl"
    watchdog = Watchdog(warn_s=WARN_S, blocked_s=1e6)
    watchdog.events = EventLog(path)
    with watchdog.watching():
        await eventually(lambda: watchdog.lag_s)
        block(WARN_S + 2 * BEAT_S)
        await eventually(lambda: read_events(path, name="loop_blocked"))
    watchdog.events.close()
    assert read_events(path, name="loop_blocked")[-1]["for_s"] >= WARN_S
    assert max(watchdog.lag_s) >= WARN_S, "the lag does not have it"


def test_a_loop_that_stays_blocked_ends_the_process_with_its_stack():
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "blocked\n"), ended.stderr
    assert "in read_a_slow_disk" in ended.stderr


def test_a_process_that_was_stopped_for_longer_continues():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "beats\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    process.send_signal(signal.SIGCONT)
    assert (process.communicate(timeout=START_S)[0], process.returncode) == ("ends\n", 0)


async def test_systemd_gets_signs_of_life_only_while_the_loop_runs(tmp_path):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.setblocking(False)
        manager = service_manager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1"})
        assert manager is not None
        loop = asyncio.get_running_loop()
        with Watchdog(warn_s=WARN_S, blocked_s=1e6, manager=manager).watching():
            async with asyncio.timeout(WAIT_S):
                assert await loop.sock_recv(systemd, 64) == ALIVE
            _drain(systemd)
            block(3 * BEAT_S)
            assert _drain(systemd) == 0, "a blocked loop notifies"
            async with asyncio.timeout(WAIT_S):
                assert await loop.sock_recv(systemd, 64) == ALIVE, "no sign of life after the loop continued"


def test_systemd_gets_signs_of_life_of_a_bootstrap_node(tmp_path, monkeypatch):
    """Its service has a watchdog, which ends a node without them every ten minutes."""
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


def test_without_a_watchdog_nothing_is_sent():
    of_another_process = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid() + 1)}
    for environment in ({}, {"NOTIFY_SOCKET": "/nowhere"}, {"NOTIFY_SOCKET": "/nowhere", **of_another_process}):
        assert service_manager(environment) is None
