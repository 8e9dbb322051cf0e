"""Real vLLM with shared weights, with weights discarded during sleep, and with tokens in flight at a weight sync.

Shared memory of the CPU replaces CUDA IPC (`tests/cpu_sharing.py`). The last test uses CUDA IPC on a GPU. On a CPU vLLM
frees no memory during sleep. Its core pauses and resumes as on a GPU.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from generation_support import (
    CLOSE,
    EMBEDDING_ROWS,
    NEVER,
    completions_of,
    file_tensors,
    make_request,
    mixed_logprobs,
    num_sampled_by_old,
    save_model,
    tiny_model,
)
from generation_vllm_support import VLLM_MODEL, make_client

from ftis_node.errors import ModelError, WorkerTaskError
from ftis_node.generation.client import GenerationClient
from ftis_node.workers.shared_tensors import Exporter
from ftis_node.workers.tensor_file import checksum
from ftis_node.workers.weight_store import PublishedWeights, prove, publish_weights
from tests import cpu_sharing
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

PROMPT = [3, 1, 4]
LENGTHS = (*range(60, 72), 200, 300, 400, 500)  # the long ones are in flight even if the weights come late


def share(exporter: Exporter, model: Any, version: int) -> PublishedWeights:
    """Share the model's tensors as the learner does."""
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    shared = exporter.share(tensors)
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    return PublishedWeights(version, "", shared.num_bytes, checksums=checksums, transfer="ipc", shared=shared)


async def draw(client: GenerationClient, *, max_tokens: int = 8) -> Any:
    request = make_request(PROMPT, num_completions=1, max_tokens=max_tokens, eos_ids=NEVER, seed=None)
    return completions_of(await client.generate(request))[0]


async def test_completions_in_flight_report_the_versions_that_sampled_them(vllm, tmp_path):
    """A completion ends at each step, also at the one in flight when the weights come."""
    old, new = tiny_model(**VLLM_MODEL), tiny_model(seed=1, **VLLM_MODEL)
    weights = publish_weights(tmp_path / "weights", 1, file_tensors(new))
    proof = prove(new, version=1, vocab_size=EMBEDDING_ROWS)
    await vllm.serve()
    running = [asyncio.create_task(draw(vllm, max_tokens=length)) for length in LENGTHS]
    await eventually(lambda: any(task.done() for task in running))
    await vllm.update_weights(weights, proof)
    completions = await asyncio.gather(*running)
    versions = set()
    for completion in completions:
        ids = completion.token_ids.tolist()
        (num_old,) = num_sampled_by_old(old, new, PROMPT, ids, completion.logprobs)
        expected = (0, 1 if num_old < len(ids) else 0)
        assert (completion.policy_version, completion.policy_version_newest) == expected, (num_old, len(ids))
        versions.add(expected)
    assert (versions, vllm.restarts) == ({(0, 0), (0, 1)}, 0)


async def test_shared_tensors_are_served_and_restored_after_a_discard(vllm, tmp_path, monkeypatch):
    cpu_sharing.install(monkeypatch.setattr)
    model, exporter, exports = tiny_model(seed=1, **VLLM_MODEL), Exporter(), set()
    for parameter in model.parameters():
        parameter.data.share_memory_()
    await vllm.serve()
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        weights = share(exporter, model, version)
        exports.add(weights.shared.export_id if weights.shared else "")
        await vllm.sleep(discard=True)
        await vllm.update_weights(weights, prove(model, version=version, vocab_size=EMBEDDING_ROWS))
        assert (vllm.weight_transfer, vllm.policy_version, vllm.restarts) == ("CUDA IPC", version, 0)
        completion = await draw(vllm)
        assert (completion.policy_version, completion.policy_version_newest) == (version, version)
        ids = completion.token_ids.tolist()
        assert np.abs(mixed_logprobs(model, model, PROMPT, ids, len(ids)) - completion.logprobs).max() < CLOSE
    assert len(exports) == 1
    await vllm.sleep(discard=True)
    waiting = asyncio.create_task(draw(vllm))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await vllm.wake()
    assert (await waiting).policy_version == 3
    await vllm.sleep(discard=True)
    damaged = publish_weights(tmp_path / "weights", 4, {"other": torch.ones(3)})
    with pytest.raises(ModelError, match="do not fit the model"):
        await vllm.update_weights(damaged, None)
    assert (await draw(vllm)).policy_version == 3
    assert vllm.restarts == 0
    with torch.no_grad():
        model.model.norm.weight[3] += 0.25
    difference = await vllm.load(weights)
    assert difference is not None and "in 1 of " in difference and "model.norm.weight" in difference


async def test_a_sleep_interrupts_completions_which_continue_with_the_new_weights(vllm, tmp_path):
    """Tokens and log-probs from before the sleep are kept. After it the new weights compute the whole prefix again."""
    old, new = tiny_model(**VLLM_MODEL), tiny_model(seed=1, **VLLM_MODEL)
    weights = publish_weights(tmp_path / "weights", 1, file_tensors(new))
    await vllm.serve()
    await vllm.wake()  # no-op: it is awake
    before = (await vllm.inspect()).tokens_made
    request = make_request(PROMPT, num_completions=3, max_tokens=400, eos_ids=NEVER, seed=7)
    running = asyncio.create_task(vllm.generate(request))
    await vllm.wait_for_tokens(before + 30)
    await vllm.sleep()
    waiting, given_up = asyncio.create_task(draw(vllm)), asyncio.create_task(draw(vllm))
    with pytest.raises(WorkerTaskError, match="asleep"):
        await vllm.probe((0, 1))
    given_up.cancel()
    state = await vllm.inspect()
    num_sampled = state.tokens_made - before
    assert (state.num_running, state.num_scheduled) == (0, 0)
    assert 30 <= num_sampled < 1200
    assert not waiting.done()
    assert not running.done()
    await vllm.update_weights(weights, prove(new, version=1, vocab_size=EMBEDDING_ROWS))
    completions = completions_of(await running)
    num_old = 0
    for completion in completions:
        ids = completion.token_ids.tolist()
        by_old, by_new = (mixed_logprobs(model, model, PROMPT, ids, 400) - completion.logprobs for model in (old, new))
        first = int((np.abs(by_old) > CLOSE).argmax())
        num_old += first
        assert np.abs(by_new[first:]).max() < CLOSE
        assert (len(ids), completion.policy_version, completion.policy_version_newest) == (400, 0, 1)
    assert abs(num_old - num_sampled) <= 6, "tokens from before the sleep were sampled again, or lost"
    assert len({completion.token_ids.tobytes() for completion in completions}) == 3
    assert (await waiting).policy_version == 1


async def test_vllm_on_a_gpu_serves_tensors_of_another_process(tmp_path):
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
