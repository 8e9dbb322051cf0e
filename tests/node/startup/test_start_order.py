"""On a shared card the generator starts after the learner, which may need all of the memory to measure its kernels."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ftis_node.memory.placement import WorkerPlacement
from ftis_node.node.startup.running_components import _start
from ftis_node.telemetry.log import unwatched


@pytest.mark.parametrize(
    ("takes_turns", "order"), [(True, ["learner", "generator"]), (False, ["generator", "learner"])]
)
async def test_workers_that_take_turns_start_one_after_the_other(takes_turns, order):
    ended: list[str] = []

    def worker(name: str, seconds: float) -> Any:
        async def start(*_: Any) -> None:
            await asyncio.sleep(seconds)
            ended.append(name)

        return start

    parts = MagicMock()
    parts.context.pause.is_paused, parts.source.weights_files, parts.source.name = False, [], "m"
    parts.arrangement = WorkerPlacement(takes_turns=takes_turns)
    parts.learner.start, parts.generation.start = worker("learner", 0.2), worker("generator", 0.0)
    parts.gossip.start = parts.scorer.check = worker("other", 0.0)
    parts.learner.state, parts.context.state.step = SimpleNamespace(step=0, parameters=1), 0
    await _start(parts, unwatched)
    assert [name for name in ended if name != "other"] == order
