"""Two real worker processes of a node sync weights through shared memory, and through a file after a refusal.

Those of an adapter node use one base.

`tests/cpu_sharing.py` replaces CUDA IPC by shared memory of a CPU. The rest of the path is real: from the learner's
tensors through the daemon into the engine.
"""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ftis_node.config.home import Home
from ftis_node.generation.client import GenerationClient
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessNodeFactory
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.messages import TrainGroup, TrainReply
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.node.daemon import run_node
from ftis_node.node.startup.factories import NodeInputs, ProcessNodeFactory
from ftis_node.node.wiring import Wiring
from tests.cpu_sharing import REFUSAL_FILE, site_folder
from tests.node.nodes import whole_node
from tests.trained_models import trained_model
from tests.waiting import eventually


class _Factory(InProcessNodeFactory):
    """A factory of worker processes as on one GPU. It kills the generator in step 2, and memory is refused from step 3.

    A tiny model is never correct, so every second completion gets reward 1. Without it no step would change weights.
    """

    def __init__(self, home: Home, refusal: Path, placement: WorkerPlacement) -> None:
        super().__init__(LoopbackSwarm(), delay=NO_DELAY, seed=0)
        self._home, self._refusal, self._placement = home, refusal, placement

    async def arrange(self, *of: Any, **how: Any) -> WorkerPlacement:
        return self._placement

    def generation(self, of: NodeInputs, **parts: Any) -> GenerationClient:  # type: ignore[override]
        self._client = ProcessNodeFactory(of.settings, self._home).generation(of, **parts)
        return self._client

    def learner(self, of: NodeInputs, **parts: Any) -> LearnerClient:  # type: ignore[override]
        learner = ProcessNodeFactory(of.settings, self._home).learner(of, **parts)
        train = learner.train

        async def kill_and_train(groups: Sequence[TrainGroup], *, step: int, **options: Any) -> TrainReply:
            if step == 2:
                os.kill(self._client.pid, signal.SIGKILL)
                await eventually(
                    lambda: (self._client.restarts, self._client.worker_state) == (1, "ready"), within_s=120
                )
            if step == 3 and not self._placement.shares_base:
                self._refusal.touch()
            return await train([half_correct(group) for group in groups], step=step, **options)

        learner.train = kill_and_train  # type: ignore[method-assign]
        return learner


def half_correct(group: TrainGroup) -> TrainGroup:
    return replace(group, rewards=tuple(float(index % 2) for index in range(len(group.rewards))))


@pytest.mark.timeout(240)
async def test_weights_are_synced_without_a_file_or_fall_back_to_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", site_folder(tmp_path / "site"))
    monkeypatch.setenv(REFUSAL_FILE, str(tmp_path / "refuse"))
    shutil.copytree(trained_model("s", scale=0.01), tmp_path / "tiny")
    home = Home(tmp_path / "home")
    home.create()
    factory = _Factory(home, tmp_path / "refuse", WorkerPlacement(transfer="ipc"))
    async with whole_node(home, tmp_path / "tiny", factory) as parts:
        await run_node(parts, steps=3)
        assert (parts.context.state.step, parts.generation.policy_version, parts.generation.restarts) == (3, 3, 1)
        status = await Wiring(parts).status_loop().refresh()
    events = [json.loads(line) for line in home.events.read_text().splitlines()]
    paths = [event["transfer"] for event in events if event["event"] == "served"]
    reasons = [event["reason"] for event in events if event["event"] == "weight_sync_fallback"]
    assert not [event for event in events if event["event"] == "weight_sync_failed"]
    assert status.generation.weight_transfer == paths[-1]
    assert reasons == ["CUDA IPC cannot open a handle: CUDA error: invalid argument"]
    assert paths == ["CUDA IPC", "CUDA IPC", f"file ({reasons[0]})"]


@pytest.mark.timeout(300)
async def test_an_adapter_node_with_one_base_pauses_and_trains_through_the_death_of_its_generator(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", site_folder(tmp_path / "site"))
    shutil.copytree(trained_model("s", scale=0.01), tmp_path / "tiny")
    home = Home(tmp_path / "home")
    home.create()
    factory = _Factory(home, tmp_path / "refuse", WorkerPlacement(shares_base=True))
    async with whole_node(home, tmp_path / "tiny", factory, lora=True, generation={"adapters": "serve"}) as parts:
        loop, workers = Wiring(parts).pause_loop, (parts.generation, parts.learner)
        before = [worker.pid for worker in workers]
        for action in ("pause", "resume"):
            loop.change(action, {})
            await loop.check()
            assert [worker.pid is None for worker in workers] == [action == "pause"] * 2
        assert not {worker.pid for worker in workers} & set(before)
        await run_node(parts, steps=3)
        assert (parts.context.state.step, parts.generation.policy_version) == (3, 3)
        assert [worker.restarts for worker in workers] == [1, 1]
    events = [json.loads(line) for line in home.events.read_text().splitlines()]
    assert not [event for event in events if event["event"] in ("weight_sync_failed", "step_lost", "failed")]
