"""The learner as a process, killed or stopped: every step is done once or not at all; and its environment."""

import asyncio
import os
import signal
from functools import cache
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest
from learner_rig import Emit, make_boot, random_groups

from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import DiskFullError, FtisError, WorkerDiedError
from ftis_node.learner import worker
from ftis_node.learner.client import KEEPS_FREED_BLOCKS, LearnerClient, worker_environment
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import TrainRequest
from ftis_node.workers.durable import is_complete
from ftis_node.workers.liveness import RestartPolicy, Timing
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

SMALL = {"num_groups": 2, "group_size": 3}
PATIENT = Timing(stop_grace_s=30.0)  # a worker that ends sooner was not killed


def make_client(boot, tmp_path, **more):
    return LearnerClient(boot, sockets_dir=tmp_path / "s", log_path=tmp_path / "learner.log", timing=PATIENT, **more)


@cache
def long_groups():
    """Return groups whose completions, one at a time, take several seconds."""
    return random_groups(num_groups=60, group_size=12, max_length=60)


async def begin_long_step(client, step):
    """Start a step that is in progress when this returns."""
    train = asyncio.create_task(client.train(long_groups(), step=step))
    await asyncio.sleep(0.5)
    assert not train.done()
    return train


async def test_a_worker_killed_between_steps_and_in_a_step_resumes_and_does_each_step_once(model_folder, tmp_path):
    """Without a checkpoint a death loses the step before, so the caller must ask for the current step."""
    boot = make_boot(model_folder, tmp_path / "home", micro_batch_tokens=1, checkpoint_every_steps=10)
    client = make_client(boot, tmp_path, restart_policy=RestartPolicy(backoff=ExponentialBackoff(first_s=0.1)))
    try:
        state = await client.start()
        assert (state.step, state.policy_version, state.weights) == (0, 0, None)
        assert state.parameters == state.trainable_parameters > 0
        with pytest.raises(FtisError, match="is at step 0 and cannot do step 2") as caught:
            await client.train(random_groups(seed=1, **SMALL), step=2)
        assert type(caught.value) is FtisError, "without a death it is an error of the caller"
        first = await client.train(random_groups(seed=1, **SMALL), step=1)
        assert (first.report.step, first.weights.version, first.proof.version) == (1, 1, 1)
        os.kill(client.pid, signal.SIGKILL)
        await eventually(lambda: client.restarts, within_s=60)
        with pytest.raises(WorkerDiedError, match="died between two steps"):
            await client.train(random_groups(seed=2, **SMALL), step=2)
        assert (await client.start()).step == 0
        again = await client.train(random_groups(seed=1, **SMALL), step=1)
        assert again.proof == first.proof
        newest = tmp_path / "home" / "checkpoints" / "step-00000001"
        assert not is_complete(newest)
        assert await client.save() == 1
        assert is_complete(newest)

        train = await begin_long_step(client, 2)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await train
        state = await client.start()
        assert (client.restarts, client.state) == (2, state)
        assert (state.step, state.proof, state.weights) == (1, first.proof, again.weights)
        second = await client.train(random_groups(seed=2, **SMALL), step=2)
        repeated = await client.train(random_groups(seed=2, **SMALL), step=2)
        assert (second.report.repeated, repeated.report.repeated) == (False, True)
        assert repeated.proof == second.proof
        skipped = await client.train([], step=3)
        assert (skipped.report.skipped, skipped.weights) == ("no groups", None)
    finally:
        await client.stop()

    assert Learner(boot).state().step == 3  # step 3 changed nothing, so its checkpoint was written at the end
    uninterrupted = Learner(make_boot(model_folder, tmp_path / "other", micro_batch_tokens=1))
    uninterrupted.train(random_groups(seed=1, **SMALL), step=1)
    assert uninterrupted.train(random_groups(seed=2, **SMALL), step=2).proof == second.proof


async def test_a_later_error_of_a_learner_that_lost_no_step_keeps_its_class(tmp_path, monkeypatch):
    """It died between two steps, with the newest one on disk, and then did the next step."""
    client = make_client(make_boot(tmp_path, tmp_path), tmp_path)
    reply, full = object(), DiskFullError("the disk is full")
    monkeypatch.setattr(client.supervisor, "call", AsyncMock(side_effect=[full, reply, full]))
    client.supervisor.restarts = 1
    with pytest.raises(WorkerDiedError, match="died between two steps"):
        await client.train([], step=1)
    assert await client.train([], step=1) is reply
    with pytest.raises(DiskFullError):
        await client.train([], step=2)


async def test_the_newest_step_is_saved_without_a_next_one(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "IDLE_POLL_INTERVAL_S", 0.05)
    async with worker.build(make_boot(model_folder, tmp_path, checkpoint_every_steps=None), Emit()) as handlers:
        for step in (1, 2):  # the first write takes longer than a step
            request = TrainRequest(step=step, groups=tuple(random_groups(seed=step, **SMALL)))
            await handlers[TrainRequest](request, Emit())
        await eventually(lambda: is_complete(tmp_path / "checkpoints" / "step-00000002"), within_s=60)


async def test_a_worker_stopped_in_a_slow_pass_on_a_slow_disk_saves_the_newest_step(model_folder, tmp_path):
    """Pass and write each take longer than the grace period of a worker without progress."""
    client = LearnerClient(
        make_boot(model_folder, tmp_path / "home", checkpoint_every_steps=1000),
        sockets_dir=tmp_path / "s",
        log_path=tmp_path / "learner.log",
        timing=Timing(stop_grace_s=2.0, save_limit_s=120.0),
        environment={"SLOW_PASS_S": "4", "SLOW_SAVE_S": "2.5", "PYTHONPATH": str(Path(__file__).parents[2])},
        worker_module="tests.node.slow_save",
    )
    try:
        await client.start()
        await client.train(random_groups(seed=1, **SMALL), step=1)
        train = asyncio.create_task(client.train(random_groups(seed=2, **SMALL), step=2))
        await asyncio.sleep(0.5)
        assert not train.done()
    finally:
        await client.stop()
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await train
    assert is_complete(tmp_path / "home" / "checkpoints" / "step-00000001")


def test_segments_are_expandable_on_a_gpu_whose_weights_no_engine_maps(tmp_path, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    on_gpu = msgspec.structs.replace(make_boot(tmp_path, tmp_path), device="cuda")
    assert worker_environment(on_gpu)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for other in (msgspec.structs.replace(on_gpu, device="cpu"), msgspec.structs.replace(on_gpu, transfer="ipc")):
        assert "PYTORCH_CUDA_ALLOC_CONF" not in worker_environment(other)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in worker_environment(on_gpu), "a variable that is set is not changed"


def test_freed_memory_of_the_host_is_kept_on_a_cpu_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    boot = make_boot(tmp_path, tmp_path, device="cuda", num_threads=3, kernels="plain")
    assert worker_environment(boot) == {"OMP_NUM_THREADS": "3"}
    assert worker_environment(msgspec.structs.replace(boot, device="cpu")).items() > KEEPS_FREED_BLOCKS.items()
