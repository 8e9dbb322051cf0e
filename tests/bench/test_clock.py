"""The bench of wall time with nodes of unlike speeds: what slows a node, the run's settings, and figures by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING

import psutil
import pytest

import clock
from ftis_node.config.manifest import load_manifest, parse_manifest
from nodes import slowed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLEEP = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
SIGNAL_LIMIT_S = 60.0


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """A process and its child."""
    with subprocess.Popen([sys.executable, "-c", PARENT]) as started:
        root = psutil.Process(started.pid)
        while not root.children():
            time.sleep(0.01)
        found = [root, *root.children()]
        yield found
        for process in reversed(found):
            if process.is_running():
                process.kill()


class Clock:
    """Time that passes by sleeping alone, `late` seconds longer than asked: every second sleep is a stop."""

    def __init__(self, family: list[psutil.Process], *, late: float = 0.0, breaks_at: int | None = None) -> None:
        self._family = family
        self._now = 0.0
        self._late = late
        self._breaks_at = breaks_at
        self.sleeps = 0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        expect(self._family, stopped=self.sleeps % 2 == 0)
        if self.sleeps == self._breaks_at:
            raise KeyboardInterrupt
        self._now += seconds + self._late


def expect(family: list[psutil.Process], *, stopped: bool) -> None:
    """Fails where they are not all stopped, or all running, soon: a signal takes a moment."""
    deadline = time.monotonic() + SIGNAL_LIMIT_S
    while any((each.status() == psutil.STATUS_STOPPED) != stopped for each in family):
        assert time.monotonic() < deadline, [each.status() for each in family]
        time.sleep(0.001)


def test_a_slow_process_and_its_child_run_their_share(
    family: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = Clock(family)
    monkeypatch.setattr(slowed, "time", passing)
    slow = slowed.Slowed([family[0].pid], 4)
    assert slow.speed == 1.0
    slow.take_turns(1.0)
    assert passing.sleeps == pytest.approx(2 * 10, abs=2)
    assert slow.speed == pytest.approx(0.25)
    expect(family, stopped=False)


def test_what_a_turn_took_too_long_is_made_up_for(
    family: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowed, "time", Clock(family, late=0.02))
    slow = slowed.Slowed([family[0].pid], 4)
    slow.take_turns(4.0)
    assert slow.speed == pytest.approx(0.25, abs=0.005)


def test_nothing_stays_stopped_where_the_bench_is_cut_short(
    family: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowed, "time", Clock(family, breaks_at=4))
    with pytest.raises(KeyboardInterrupt):
        slowed.Slowed([family[0].pid], 2).take_turns(1.0)
    expect(family, stopped=False)


def test_a_process_may_end_while_it_is_slowed(family: list[psutil.Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowed, "time", Clock([]))
    slow = slowed.Slowed([family[0].pid], 2)
    for process in reversed(family):
        process.kill()
        slow.take_turns(0.5)
    family[0].wait(SIGNAL_LIMIT_S)
    slow.take_turns(0.5)
    assert slow.speed == pytest.approx(0.5), "the turns go on without the process"


def options(slow: float) -> Namespace:
    settings = {"slow": slow, "slow_generation": 1.0, "prompts": 8, "eval_every": 5, "eval_problems": 300}
    return Namespace(**settings, steps=6, seeds=1, patience=1.5, fill=True)


def test_the_run_of_unlike_nodes_does_not_wait_for_the_slow_one() -> None:
    usual, unlike = (parse_manifest(clock._manifest(options(slow), own=4), source="run").step for slow in (1.0, 4.0))
    assert (usual.own_groups, usual.foreign_groups) == (unlike.own_groups, unlike.foreign_groups) == (4, 4)
    assert (usual.foreign_wait_s, usual.backfill_with_own) == (load_manifest(clock.PRESET).step.foreign_wait_s, False)
    assert (unlike.foreign_wait_s, unlike.backfill_with_own) == (1.5, True)


def test_evaluations_take_the_problems_asked_for_else_the_presets() -> None:
    parsed = options(1.0)
    assert parse_manifest(clock._manifest(parsed, own=8), source="run").eval.limit == 300
    parsed.eval_problems = 0
    usual = load_manifest(clock.PRESET).eval.limit
    assert parse_manifest(clock._manifest(parsed, own=8), source="run").eval.limit == usual != 300


def test_a_course_ends_with_the_steps_asked_for(tmp_path: Path) -> None:
    trail = tmp_path / "events.jsonl"
    assert clock.evaluations_of(trail) == clock.curve_of(trail, [], last_step=6) == []
    events = [
        {"event": "eval", "step": 5 * k, "time": 100.0 + 10 * k, "pass_at_1": 0.1 * k, "duration_s": 4.0}
        for k in range(3)
    ]
    events += [{"event": "step", "step": step, "foreign_groups": step} for step in (1, 2, 9)]
    trail.write_text("".join(json.dumps(event) + "\n" for event in events))
    pauses = clock.evaluations_of(trail)
    assert pauses == [(96.0, 100.0), (106.0, 110.0), (116.0, 120.0)]
    course = clock.node_run(trail, 0.25, pauses, last_step=6)
    assert course == clock.NodeRun([(0.0, 0.0), (6.0, 0.1)], foreign_groups=1.5, speed=0.25, step_s=1.2)
    assert clock.has_reached(trail, 10) and not clock.has_reached(trail, 11)
    peers = [(90.0, 101.0), (104.0, 107.0), (109.0, 130.0)]  # 1 s before the node's own pause, 2 s in it
    assert clock.node_run(trail, 1.0, pauses + peers, last_step=6).curve == [(0.0, 0.0), (3.0, 0.1)]


def test_figures_say_the_speeds_and_what_was_never_reached(capsys: pytest.CaptureFixture[str]) -> None:
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
