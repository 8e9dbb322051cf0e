"""A short fault injection: a real swarm, some faults by a fixed seed, and no violation. `make chaos` runs longer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos import report, schedule
from tests.chaos.__main__ import ONE_THREAD
from tests.chaos.faults import catalog as faults
from tests.chaos.observation.evidence import Evidence
from tests.chaos.runner import Outcome, Runner
from tests.chaos.swarm import Swarm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SEED = 8
STOP_AFTER_S = 600.0  # on a busy machine not all faults run
MIN_FAULTS = 6
FAULTS = (
    *("kill-daemon", "kill-generator", "kill-learner", "kill-network", "kill-bootstrap", "stop-network"),
    *("isolate", "false-claims", "open-streams", "clock-minutes-ahead"),
    *("database-corrupted", "checkpoint-truncated", "event-log-garbage", "key-corrupted", "peers-locked", "disk-full"),
)


@pytest.mark.timeout(3000)
def test_a_swarm_recovers_from_one_fault_of_each_kind(
    tmp_path: Path, tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    known, lines, outcomes, started_at = faults.chosen(FAULTS), list[str](), list[Outcome](), time.monotonic()
    with Swarm.running(tmp_path, tiny_models) as swarm:
        runner = Runner(swarm, known, Evidence(tmp_path))
        possible = faults.fitting(known, swarm)
        planned = schedule.first(len(possible), possible, seed=SEED)
        for outcome in runner.run_all(schedule.by_node(planned), stop_after_s=STOP_AFTER_S):
            outcomes.append(outcome)
            lines += report.lines_of(outcome, at_s=time.monotonic() - started_at)
        at_end = runner.end()
    printed = "\n".join([*lines, *map(str, at_end), f"reports: {tmp_path / 'violations'}"])
    assert len(outcomes) >= MIN_FAULTS, printed
    assert report.last_line(outcomes, at_end) == f"{len(outcomes)} faults, 0 violations", printed
