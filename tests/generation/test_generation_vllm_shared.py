"""Real vLLM with shared weights, with weights discarded during sleep, and with tokens in flight at a hand-over.

Shared memory of the CPU replaces CUDA IPC (`tests/cpu_sharing.py`). The last test uses CUDA IPC on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation_support import (
    CLOSE,
    EMBEDDING_ROWS,
    completions_of,
    file_tensors,
    mixed_logprobs,
    num_sampled_by_old,
    save_model,
    tiny_model,
)
from generation_vllm_support import VLLM_MODEL, make_client

from ftis_node.errors import ModelError
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import GenerateRequest
from ftis_node.records.group import SamplingSettings
from ftis_node.workers.shared_tensors import Exporter
from ftis_node.workers.tensor_file import checksum
from ftis_node.workers.weight_store import PublishedWeights, WeightStore, prove
from tests import cpu_sharing
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

PROMPT = [3, 1, 4]
FIRST_LENGTH, NUM_COMPLETIONS = 60, 80
LONG_LENGTHS = (200, 300, 400, 500)  # in flight even if the weights come late

Open = Callable[..., contextlib.AbstractAsyncContextManager[GenerationClient]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """`opened(core)` starts a client of a real worker, whose processes share weights as on a GPU."""
    monkeypatch.setenv("PYTHONPATH", cpu_sharing.site_folder(tmp_path / "site"))
    cpu_sharing.install(monkeypatch.setattr)
    save_model(tmp_path / "model", **VLLM_MODEL)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of tiny passes: threads would wait for each other on a busy machine

    @contextlib.asynccontextmanager
    async def open_client(core: str, **changed: Any) -> AsyncIterator[GenerationClient]:
        client = make_client(tmp_path, engine_core=core, **changed)
        await client.start()
        try:
            yield client
        finally:
            await client.stop()

    yield open_client
    torch.set_num_threads(num_threads)


def share(exporter: Exporter, model: Any, version: int) -> PublishedWeights:
    """Share the model's tensors as the learner does."""
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    shared = exporter.share(tensors)
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    return PublishedWeights(version, "", shared.num_bytes, checksums=checksums, transfer="ipc", shared=shared)


async def draw(client: GenerationClient, *, max_tokens: int = 8) -> Any:
    request = GenerateRequest(
        prompt_ids=PROMPT,
        num_completions=1,
        sampling=SamplingSettings(),
        max_tokens=max_tokens,
        eos_ids=frozenset(),
    )
    return completions_of(await client.generate(request))[0]


async def test_completions_in_flight_report_the_versions_that_sampled_them(opened: Open, tmp_path: Path) -> None:
    """A completion ends at each step, also at the one in flight when the weights come.

    The core is inside the worker: on a busy machine a separate one may finish before the hand-over.
    """
    old, new = tiny_model(**VLLM_MODEL), tiny_model(seed=1, **VLLM_MODEL)
    weights = WeightStore(tmp_path / "weights").publish(1, file_tensors(new))
    proof = prove(new, version=1, vocab_size=EMBEDDING_ROWS)
    async with opened("inside") as client:
        lengths = [*range(FIRST_LENGTH, FIRST_LENGTH + NUM_COMPLETIONS), *LONG_LENGTHS]
        running = [asyncio.create_task(draw(client, max_tokens=length)) for length in lengths]
        await eventually(lambda: any(task.done() for task in running))
        await client.update_weights(weights, proof)
        completions = await asyncio.gather(*running)
        assert client.restarts == 0
    versions = set()
    for completion in completions:
        ids = completion.token_ids.tolist()
        (num_old,) = num_sampled_by_old(old, new, PROMPT, ids, completion.logprobs)
        expected = (0, 1 if num_old < len(ids) else 0)
        assert (completion.policy_version, completion.policy_version_newest) == expected, (num_old, len(ids))
        versions.add(expected)
    assert versions == {(0, 0), (0, 1)}


@pytest.mark.parametrize("core", ["inside", "separate"])
async def test_shared_tensors_are_served_and_restored_after_a_discard(opened: Open, tmp_path: Path, core: str) -> None:
    model, exporter = tiny_model(seed=1, **VLLM_MODEL), Exporter()
    for parameter in model.parameters():
        parameter.data.share_memory_()
    async with opened(core, can_sleep=True) as client:
        exports = set()
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            weights = share(exporter, model, version)
            exports.add(weights.shared.export_id if weights.shared else "")
            await client.sleep(discard=True)
            await client.update_weights(weights, prove(model, version=version, vocab_size=EMBEDDING_ROWS))
            assert (client.weight_transfer, client.policy_version, client.restarts) == ("CUDA IPC", version, 0)
            completion = await draw(client)
            assert (completion.policy_version, completion.policy_version_newest) == (version, version)
            ids = completion.token_ids.tolist()
            expected = mixed_logprobs(model, model, PROMPT, ids, len(ids))
            assert np.abs(expected - completion.logprobs).max() < CLOSE
        assert len(exports) == 1
        await client.sleep(discard=True)
        waiting = asyncio.create_task(draw(client))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await client.wake()
        assert (await waiting).policy_version == 3
        await client.sleep(discard=True)
        damaged = WeightStore(tmp_path / "weights").publish(4, {"other": torch.ones(3)})
        with pytest.raises(ModelError, match="do not fit the model"):
            await client.update_weights(damaged, None)
        assert (await draw(client)).policy_version == 3
        assert client.restarts == 0


async def test_shared_tensors_with_other_values_are_found(opened: Open) -> None:
    """On a CPU, vLLM packs all tensors but embedding, norms and biases; only those are compared."""
    model, problems = tiny_model(seed=1, **VLLM_MODEL), list[str]()
    weights = share(Exporter(), model, 1)
    with torch.no_grad():
        model.model.norm.weight[3] += 0.25
    async with opened("inside", problems=problems, max_quick_deaths=1) as client:
        with contextlib.suppress(Exception):
            await client.update_weights(weights, None)
    assert problems[0].startswith("holds other values than were published in 1 of ")
    assert "model.norm.weight" in problems[0]


async def test_vllm_on_a_gpu_serves_tensors_of_another_process(tmp_path: Path) -> None:
    """This process has the weights. vLLM's core maps them on the same GPU, asleep and awake."""
    shape = {**VLLM_MODEL, "head_dim": 64}
    save_model(tmp_path / "model", **shape)
    model, exporter = tiny_model(seed=1, **shape).to("cuda", torch.bfloat16), Exporter()
    client = make_client(
        tmp_path, engine_core="separate", device="cuda", dtype="bfloat16", can_sleep=True, cache_bytes=1 << 28,
        memory_share=0.3,
    )  # fmt: skip
    await client.start()
    try:
        for version, asleep in [(1, False), (2, True), (3, True), (4, False)]:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            if asleep:
                await client.sleep(discard=True)
            proof = prove(model, version=version, vocab_size=EMBEDDING_ROWS)
            await client.update_weights(share(exporter, model, version), proof)
            assert (client.weight_transfer, client.policy_version, client.restarts) == ("CUDA IPC", version, 0)
            assert np.isfinite((await draw(client)).logprobs).all()
    finally:
        await client.stop()
