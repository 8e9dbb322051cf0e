"""A group that the learner fails on: real workers that die of it, or that say so, and a node that goes on.

Generator and network are in this process; the learner is the worker of `ftis-node join`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import WorkerTaskError
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.delay import NO_DELAY
from ftis_node.lab.in_process import InProcessMakers
from ftis_node.lab.tiny import make_tiny
from ftis_node.node.build import built_parts
from ftis_node.node.makers import ProcessMakers
from ftis_node.node.node import run_loops
from ftis_node.node.plan import RunPlan
from ftis_node.replay.failures import MAX_FAILED_STEPS
from ftis_node.telemetry.events import read_events
from tests.node.support import MANIFEST

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.learner.client import LearnerClient
    from ftis_node.learner.messages import TrainGroup, TrainReply

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NO_TOKEN = np.array([1 << 20], dtype="<i4").tobytes()  # no model has a row for it


class _Poisoned(InProcessMakers):
    """The first group that comes to the learner kills it, or fails the request, in whatever step it is."""

    def __init__(self, home: Home, *, kills: bool) -> None:
        super().__init__(LoopbackSwarm(), delay=NO_DELAY, seed=0)
        self.poison = ""
        self.num_failed = 0
        self._home = home
        self._kills = kills

    def learner(self, of: Any) -> LearnerClient:
        client = ProcessMakers(of.settings, self._home).learner(of)
        train = client.train

        async def poisoned(groups: list[TrainGroup], **how: Any) -> TrainReply:
            self.poison = self.poison or groups[0].group_id
            if not any(group.group_id == self.poison for group in groups):
                return await train(groups, **how)
            self.num_failed += 1
            if self._kills:
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
                return await train(groups, **how)
            return await train([msgspec.structs.replace(groups[0], prompt_ids=NO_TOKEN), *groups[1:]], **how)

        client.train = poisoned  # type: ignore[method-assign]
        return client


@pytest.fixture
def home(tmp_path: Path) -> Home:
    make_tiny("s", tmp_path / "tiny", scale=0.01)
    home = Home(tmp_path / "home")
    home.create()
    return home


async def _live(home: Home, makers: _Poisoned, *, steps: int) -> int:
    """One life of the node; the step it came to."""
    settings = NodeSettings.model_validate(
        {
            "model": str(home.root.parent / "tiny"),
            "engine": "torch",
            "device": "cpu",
            "swarm": {"linger_s": 0.0},
        }
    )
    plan = RunPlan(parse_manifest(MANIFEST.format(patience_s=0.1), source="test"), "arithmetic", ())
    async with built_parts(settings, plan, home, makers) as parts:
        await run_loops(parts, steps=steps)
        return parts.figures.step


def _assert_let_go(home: Home, makers: _Poisoned) -> None:
    assert makers.num_failed == MAX_FAILED_STEPS
    released = [event["group"] for event in read_events(home.events, name="released") if event["reason"] == "poisoned"]
    assert makers.poison in released
    assert len(released) == 4, "those that were in all of its steps; they waited longest, so they came each time"
    taken = Counter(event["group"] for event in read_events(home.events, name="taken"))
    assert all(taken[group_id] == MAX_FAILED_STEPS for group_id in released)
    assert max(taken[group_id] for group_id in taken if group_id not in released) == 1


async def test_a_learner_that_dies_of_a_group_is_rid_of_it(home: Home) -> None:
    makers = _Poisoned(home, kills=True)
    assert await _live(home, makers, steps=2) == 2
    _assert_let_go(home, makers)


async def test_a_node_that_ends_with_each_failed_request_comes_past_the_group(home: Home) -> None:
    makers = _Poisoned(home, kills=False)
    for _ in range(MAX_FAILED_STEPS):
        with pytest.raises(ExceptionGroup) as raised:
            await _live(home, makers, steps=2)
        assert raised.group_contains(WorkerTaskError, match="index out of range")
    assert await _live(home, makers, steps=2) == 2
    _assert_let_go(home, makers)
