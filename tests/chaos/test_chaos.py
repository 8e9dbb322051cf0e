"""Chaos in small: a real swarm, one fault of each sort by a fixed seed, and nothing broken. By hand: `make chaos`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos import report, schedule
from tests.chaos.__main__ import ONE_THREAD
from tests.chaos.faults import catalog as faults
from tests.chaos.observing.evidence import Evidence
from tests.chaos.runner import Outcome, Runner
from tests.chaos.swarm import Swarm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SEED = 8
NO_NEW_ONE_AFTER_S = 600.0  # on a machine so busy the rest is left for another day
FEWEST = 6
PLAYED = (
    *("kill-daemon", "kill-generator", "kill-learner", "kill-network", "kill-meeting-point", "stop-network"),
    *("cut-off", "liar", "held-streams", "clock-minutes-ahead"),
    *("database-turned", "checkpoint-cut", "trail-garbage", "key-turned", "peers-busy", "disk-full"),
)


@pytest.mark.timeout(3000)
def test_a_swarm_outlives_one_fault_of_each_sort(
    tmp_path: Path, tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    known, lines, outcomes, started_at = faults.chosen(PLAYED), list[str](), list[Outcome](), time.monotonic()
    with Swarm.running(tmp_path, tiny_models) as swarm:
        runner = Runner(swarm, known, Evidence(tmp_path))
        possible = faults.fitting(known, swarm)
        planned = schedule.first(len(possible), possible, seed=SEED)
        for outcome in runner.play_all(schedule.lanes(planned), stop_after_s=NO_NEW_ONE_AFTER_S):
            outcomes.append(outcome)
            lines += report.lines_of(outcome, at_s=time.monotonic() - started_at)
        at_end = runner.end()
    told = "\n".join([*lines, *map(str, at_end), f"reports: {tmp_path / 'violations'}"])
    assert len(outcomes) >= FEWEST, told
    assert report.last_line(outcomes, at_end) == f"{len(outcomes)} faults, 0 violations", told
