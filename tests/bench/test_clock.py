"""The bench of wall time with nodes of different speeds: slowed processes, settings of the run, computed figures."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import clock
from ftis_node.config.manifest import load_manifest, parse_manifest
from nodes import slowed
from tests.waiting import wait_until

SLEEP = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
SIGNAL_LIMIT_S = 60.0


@pytest.fixture
def processes() -> Iterator[list[psutil.Process]]:
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
    """A clock that only `sleep` advances, by `late` seconds more than asked.

    It asserts that the processes run during each odd sleep and are stopped during each even one.
    """

    def __init__(self, processes: list[psutil.Process], *, late: float = 0.0, interrupt_at: int | None = None) -> None:
        self._processes = processes
        self._now = 0.0
        self._late = late
        self._interrupt_at = interrupt_at
        self.sleeps = 0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        wait_for_state(self._processes, stopped=self.sleeps % 2 == 0)
        if self.sleeps == self._interrupt_at:
            raise KeyboardInterrupt
        self._now += seconds + self._late


def wait_for_state(processes: list[psutil.Process], *, stopped: bool) -> None:
    """Wait until all processes are stopped, or all run: a signal takes a moment."""
    wait_until(
        lambda: all((each.status() == psutil.STATUS_STOPPED) == stopped for each in processes), within_s=SIGNAL_LIMIT_S
    )


def test_a_slowed_process_and_its_child_run_for_their_share_of_time(
    processes: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_of_sleeps = Clock(processes)
    monkeypatch.setattr(slowed, "time", clock_of_sleeps)
    slow = slowed.Slowed([processes[0].pid], 4)
    assert slow.speed == 1.0
    slow.take_turns(1.0)
    assert clock_of_sleeps.sleeps == pytest.approx(2 * 10, abs=2)
    assert slow.speed == pytest.approx(0.25)
    wait_for_state(processes, stopped=False)


def test_a_turn_that_took_too_long_is_compensated(
    processes: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowed, "time", Clock(processes, late=0.02))
    slow = slowed.Slowed([processes[0].pid], 4)
    slow.take_turns(4.0)
    assert slow.speed == pytest.approx(0.25, abs=0.005)


def test_no_process_stays_stopped_after_an_interrupt(
    processes: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowed, "time", Clock(processes, interrupt_at=4))
    with pytest.raises(KeyboardInterrupt):
        slowed.Slowed([processes[0].pid], 2).take_turns(1.0)
    wait_for_state(processes, stopped=False)


def test_a_process_may_end_while_it_is_slowed(processes: list[psutil.Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowed, "time", Clock([]))
    slow = slowed.Slowed([processes[0].pid], 2)
    for process in reversed(processes):
        process.kill()
        slow.take_turns(0.5)
    processes[0].wait(SIGNAL_LIMIT_S)
    slow.take_turns(0.5)
    assert slow.speed == pytest.approx(0.5), "the turns continue without the process"


def options(slow: float) -> Namespace:
    settings = {"slow": slow, "slow_generation": 1.0, "prompts": 8, "eval_every": 5, "eval_problems": 300}
    return Namespace(**settings, steps=6, seeds=1, patience=1.5, fill=True)


def test_the_run_of_nodes_of_different_speeds_does_not_wait_for_the_slow_one() -> None:
    usual, different = (parse_manifest(clock._manifest(options(slow), own=4), source="run").step for slow in (1.0, 4.0))
    assert (usual.own_groups, usual.foreign_groups) == (different.own_groups, different.foreign_groups) == (4, 4)
    assert (usual.foreign_wait_s, usual.backfill_with_own) == (load_manifest(clock.PRESET).step.foreign_wait_s, False)
    assert (different.foreign_wait_s, different.backfill_with_own) == (1.5, True)


def test_evaluations_use_the_number_of_problems_of_the_options_or_the_preset() -> None:
    parsed = options(1.0)
    assert parse_manifest(clock._manifest(parsed, own=8), source="run").eval.limit == 300
    parsed.eval_problems = 0
    usual = load_manifest(clock.PRESET).eval.limit
    assert parse_manifest(clock._manifest(parsed, own=8), source="run").eval.limit == usual != 300


def test_a_course_ends_with_the_last_step(tmp_path: Path) -> None:
    event_log = tmp_path / "events.jsonl"
    assert clock.evaluations_of(event_log) == clock.curve_of(event_log, [], last_step=6) == []
    events = [
        {"event": "eval", "step": 5 * k, "time": 100.0 + 10 * k, "pass_at_1": 0.1 * k, "duration_s": 4.0}
        for k in range(3)
    ]
    events += [{"event": "step", "step": step, "foreign_groups": step} for step in (1, 2, 9)]
    event_log.write_text("".join(json.dumps(event) + "\n" for event in events))
    pauses = clock.evaluations_of(event_log)
    assert pauses == [(96.0, 100.0), (106.0, 110.0), (116.0, 120.0)]
    course = clock.node_run(event_log, 0.25, pauses, last_step=6)
    assert course == clock.NodeRun([(0.0, 0.0), (6.0, 0.1)], foreign_groups=1.5, speed=0.25, step_s=1.2)
    assert clock.has_reached(event_log, 10) and not clock.has_reached(event_log, 11)
    peers = [(90.0, 101.0), (104.0, 107.0), (109.0, 130.0)]  # 1 s before the node's pause, 2 s in it
    assert clock.node_run(event_log, 1.0, pauses + peers, last_step=6).curve == [(0.0, 0.0), (3.0, 0.1)]


def test_figures_have_the_speeds_and_null_for_what_was_not_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert clock.seconds_to([(0.0, 0.2), (10.0, 0.4)], 0.3) == pytest.approx(5.0)
    seconds = {"alone": [10.0, 0.0, 10.0], "with_peer": [5.0, 0.0, math.inf]}
    found = {"m": {f"{side}_s_to_{share}": taken for side, taken in seconds.items() for share in clock.SHARES}}
    found["m"] |= {"alone_step_s": [1.0] * 3, "with_peer_step_s": [0.6] * 3}
    clock.print_figures(found, {"m": 0.25}, options(4.0), 0.5)
    *table, line = capsys.readouterr().out.splitlines()
    assert all(row.startswith("m with 0.25 of a core: ") for row in table)
    document = json.loads(line)
    assert (document["speeds"], document["fill"], document["patience_s"]) == ({"m": 0.25}, True, 1.5)
    assert document["models"]["m"]["ratio_to_0.8"] == [0.5, None, None]
    assert document["models"]["m"]["with_peer_s_to_0.9"] == [5.0, 0.0, None]
    assert document["models"]["m"]["predicted_ratio_to_0.9_of_4"] == [0.333, None, None]  # 0.5 * 0.4 / 0.6
