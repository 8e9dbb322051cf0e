"""Processes that a bench slows down run for their share of time."""

import subprocess
import sys

import psutil
import pytest

from nodes import slowed
from tests.waiting import wait_until

SLEEP = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
SIGNAL_LIMIT_S = 60.0


@pytest.fixture
def processes():
    """A parent process and its child."""
    with subprocess.Popen([sys.executable, "-c", PARENT]) as started:
        root = psutil.Process(started.pid)
        wait_until(root.children, within_s=SIGNAL_LIMIT_S)
        found = [root, *root.children()]
        yield found
        for process in reversed(found):
            if process.is_running():
                process.kill()


class Clock:
    """A clock that only `sleep` advances.

    It asserts that the processes run during each odd sleep and are stopped during each even one.
    """

    def __init__(self, processes: list[psutil.Process], *, interrupt_at: int | None = None) -> None:
        self._processes = processes
        self._now = 0.0
        self._interrupt_at = interrupt_at
        self.sleeps = 0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        wait_for_state(self._processes, stopped=self.sleeps % 2 == 0)
        if self.sleeps == self._interrupt_at:
            raise KeyboardInterrupt
        self._now += seconds


def wait_for_state(processes: list[psutil.Process], *, stopped: bool) -> None:
    """Wait until all processes are stopped, or all run: a signal takes a moment."""
    wait_until(
        lambda: all((each.status() == psutil.STATUS_STOPPED) == stopped for each in processes), within_s=SIGNAL_LIMIT_S
    )


def test_a_slowed_process_and_its_child_run_for_their_share_of_time(processes, monkeypatch):
    clock_of_sleeps = Clock(processes)
    monkeypatch.setattr(slowed, "time", clock_of_sleeps)
    slow = slowed.Slowed([processes[0].pid], 4)
    assert slow.speed == 1.0
    slow.take_turns(1.0)
    assert clock_of_sleeps.sleeps == pytest.approx(2 * 10, abs=2)
    assert slow.speed == pytest.approx(0.25)
    wait_for_state(processes, stopped=False)


def test_no_process_stays_stopped_after_an_interrupt(processes, monkeypatch):
    monkeypatch.setattr(slowed, "time", Clock(processes, interrupt_at=4))
    with pytest.raises(KeyboardInterrupt):
        slowed.Slowed([processes[0].pid], 2).take_turns(1.0)
    wait_for_state(processes, stopped=False)
