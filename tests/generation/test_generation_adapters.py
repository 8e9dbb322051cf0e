"""LoRA adapters by version, served by a real vLLM on the CPU, and by the torch engine.

A learner publishes the adapters, with weights drawn by version. The reference is its own forward pass.
"""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from generation_support import NEVER, SETTINGS, completions_of, fresh_logprobs, make_request, save_model
from generation_vllm_support import RemoteEngine
from safetensors.torch import load_file, save_file

from ftis_node.config.workers import LoraSection, Quantize
from ftis_node.errors import ModelError
from ftis_node.generation.engines import torch_engine
from ftis_node.generation.engines.base import GenerationResult
from ftis_node.generation.engines.published import check_adapter, shapes_in
from ftis_node.generation.engines.vllm_core import LoraAdapters
from ftis_node.learner.checkpoint.publication import WeightPublication, proof_of
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model.policy_loading import load_policy
from ftis_node.models import resolve_model
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from ftis_node.records.group import FinishReason
from ftis_node.workers.durable import MARKER
from ftis_node.workers.weight_store import PublishedWeights, find_difference, publish_weights

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

PROMPT = (3, 1, 4, 1, 5)
RANK = 4  # vLLM allocates 8
MAX_VERSION_SPAN = 5
LONG = 4000  # tokens: never reached


class Versions:
    """A learner's policy with a random adapter for each version, and the folder in which it publishes them."""

    def __init__(self, home: Path, *, quantize: Quantize = "none") -> None:
        self.model = save_model(home / "model", head_dim=32, num_layers=4)
        # Half the tests' usual weights: with larger ones float32 would round by more than the tolerance of 1e-5.
        tensors = {name: 0.5 * value for name, value in load_file(self.model / "model.safetensors").items()}
        save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LONG}))
        boot = LearnerBoot(
            model=str(self.model),
            model_name="tiny",
            run_id="run",
            checkpoints_dir=str(home / "checkpoints"),
            weights_dir=str(home / "weights"),
            lora=LoraSection(rank=RANK, alpha=2 * RANK),
            quantize=quantize,
        )
        self.policy = load_policy(boot)
        self.folder = home / "weights"
        self._numbers = itertools.count(1)

    def model_of(self, version: int) -> Any:
        """Return the float32 model with the adapter of that version."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for value in self.policy.trainable().values():
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))
        return self.policy.causal_lm

    def publish(self) -> PublishedWeights:
        """Publish the next version."""
        version = next(self._numbers)
        self.model_of(version)
        return WeightPublication(self.policy, self.folder, form="adapter").publish(version)

    def logprobs(self, result: GenerationResult, index: int) -> Any:
        """Return the expected log-probs of a completion under the one version that sampled it."""
        completion = completions_of(result)[index]
        assert completion.policy_version == completion.policy_version_newest
        return fresh_logprobs(self.model_of(completion.policy_version), PROMPT, completion)

    def check(self, result: GenerationResult, version: int) -> None:
        """Assert that each token of the group is of that version, by its log-probs within 1e-5."""
        for index, completion in enumerate(completions_of(result)):
            assert completion.policy_version == version
            np.testing.assert_allclose(completion.logprobs, self.logprobs(result, index), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    return Versions(tmp_path_factory.mktemp("adapters"))


@pytest_asyncio.fixture(loop_scope="session")
async def client(versions, vllm):
    """An engine that serves a first adapter."""
    settings = msgspec.structs.replace(
        SETTINGS, max_batch=16, max_model_len=2 * LONG, lora_rank=RANK, max_version_span=MAX_VERSION_SPAN
    )
    await vllm.open(versions.model, settings)
    await vllm.update_weights(versions.publish())
    return vllm


async def make_group(client: RemoteEngine, *, max_tokens: int = 12, num_completions: int = 2) -> GenerationResult:
    request = make_request(PROMPT, num_completions=num_completions, max_tokens=max_tokens, eos_ids=NEVER, seed=None)
    return await client.generate(request)


async def begin(client: RemoteEngine) -> asyncio.Task[GenerationResult]:
    """Start a group of up to `LONG` tokens. Returns when the engine samples it."""
    task = asyncio.create_task(make_group(client, max_tokens=LONG, num_completions=1))
    await make_group(client, max_tokens=4)  # requested later and finished: the other has begun
    return task


async def test_each_version_is_served_as_the_learner_computes_it(versions, client):
    for _ in range(3):
        weights = versions.publish()
        assert weights.path.endswith(ADAPTER_FILE)
        await client.update_weights(weights, proof_of(versions.policy, version=weights.version))
        versions.check(await make_group(client), weights.version)
    versions.model_of(10_000)  # a learner that restarted publishes a version again
    other = WeightPublication(versions.policy, versions.folder, form="adapter").publish(weights.version)
    await client.update_weights(other, proof_of(versions.policy, version=weights.version))
    assert (await make_group(client)).policy_version == weights.version
    assert client.restarts == 0


async def test_vllm_on_a_4_bit_base_serves_each_adapter_as_the_learner_computes_it(vllm, tmp_path):
    versions = Versions(tmp_path, quantize="4bit")
    settings = msgspec.structs.replace(SETTINGS, max_batch=16, max_model_len=64, lora_rank=RANK, quantize="4bit")
    await vllm.open(versions.model, settings)
    for _ in range(2):
        weights = versions.publish()
        await vllm.update_weights(weights, proof_of(versions.policy, version=weights.version))
        versions.check(await make_group(vllm), weights.version)
    assert not vllm.problems


async def test_the_torch_engine_serves_each_adapter_as_the_learner_computes_it(versions, tmp_path):
    settings = msgspec.structs.replace(SETTINGS, lora_rank=RANK)
    engine = await torch_engine.open_engine(resolve_model(str(versions.model)), settings, lambda: None)
    request = make_request(PROMPT, num_completions=2, max_tokens=12, eos_ids=NEVER)
    try:
        starting = await engine.generate(request)
        for _ in range(2):
            weights = versions.publish()
            held = await engine.load_weights(Path(weights.path), weights.version)
            assert find_difference(weights.checksums, held) is None
            versions.check(await engine.generate(request), weights.version)
        served = await engine.probe(PROMPT)
        with pytest.raises(ModelError, match="is of rank 8"):
            await engine.load_weights(other_adapter(tmp_path, rank=2 * RANK), 9)
        assert (await engine.probe(PROMPT), engine.policy_version) == (served, weights.version)

        await engine.load_weights(other_adapter(tmp_path, rank=1), 10)  # of another learner: peft adds it again
        assert not np.allclose(await engine.probe(PROMPT), served, atol=1e-3)
        whole = publish_weights(tmp_path / "whole", 11, load_file(versions.model / "model.safetensors"))
        await engine.load_weights(Path(whole.path), 11)
        again = await engine.generate(request)
        assert np.array_equal(again.tokens.logprobs, starting.tokens.logprobs), "the base without an adapter"
    finally:
        await engine.close()


def other_adapter(folder: Path, *, rank: int) -> Path:
    """Return a random adapter of the attention's outputs."""
    written = folder / f"rank-{rank}"
    written.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"]}
    (written / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    tensors = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.full((rank, 128), 0.1)
        tensors[f"{name}.lora_B.weight"] = torch.full((128, rank), 0.1)
    save_file(tensors, written / ADAPTER_FILE)
    (written / MARKER).touch()
    return written / ADAPTER_FILE


async def test_completions_in_flight_keep_their_adapter_and_new_ones_get_the_newest(versions, client):
    before = client.policy_version
    under_way = asyncio.create_task(make_group(client, max_tokens=400))
    await make_group(client, max_tokens=4)
    await client.update_weights(versions.publish())
    versions.check(await make_group(client), before + 1)
    assert not under_way.done()
    result = await under_way
    assert {completion.finish_reason for completion in completions_of(result)} == {FinishReason.LENGTH}
    versions.check(result, before)


async def test_completions_are_aborted_when_too_old_or_without_an_adapter_slot(versions, client):
    first = client.policy_version
    oldest = await begin(client)
    for _ in range(2):
        await client.update_weights(versions.publish())
        newest = await begin(client)
    assert not oldest.done()
    await client.update_weights(versions.publish())  # the fourth: vLLM has three slots
    result = await asyncio.wait_for(oldest, 10)
    assert completions_of(result)[0].finish_reason is FinishReason.ABORT
    versions.check(result, first)
    for _ in range(MAX_VERSION_SPAN - 1):
        await client.update_weights(versions.publish())
    await make_group(client)
    assert not newest.done()
    await client.update_weights(versions.publish())
    result = await asyncio.wait_for(newest, 10)
    versions.check(result, first + 2)
    versions.check(await make_group(client), client.policy_version)


def cut_short(folder: Path) -> None:
    path = folder / ADAPTER_FILE
    path.write_bytes(path.read_bytes()[:-8])


def change_config(folder: Path, **changes: object) -> None:
    path = folder / ADAPTER_CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "is damaged": cut_short,
    "is incomplete": lambda folder: (folder / "COMPLETE").unlink(),
    "of rank 5: ranks from 1 to 4": lambda folder: change_config(folder, r=5),
    "no plain LoRA adapter \\(use_dora\\)": lambda folder: change_config(folder, use_dora=True),
    "names unknown": lambda folder: change_config(folder, target_modules=["k_proj"]),
}


@pytest.mark.parametrize("problem", DAMAGES)
async def test_an_invalid_adapter_is_refused(versions, tmp_path, problem):
    shapes, _ = shapes_in(resolve_model(str(versions.model)))
    versions.model_of(1)
    published = WeightPublication(versions.policy, tmp_path, form="adapter").publish(1)
    folder = tmp_path / "weights-00000001"
    assert published.path == str(folder / ADAPTER_FILE)
    check_adapter(folder, shapes, max_rank=RANK)
    with pytest.raises(ModelError, match="serves none"):
        check_adapter(folder, shapes, max_rank=None)
    DAMAGES[problem](folder)
    with pytest.raises(ModelError, match=problem):
        check_adapter(folder, shapes, max_rank=RANK)


async def test_a_refused_adapter_leaves_the_previous_version(versions, client, tmp_path):
    before = client.policy_version
    published = WeightPublication(versions.policy, tmp_path, form="adapter").publish(99)
    change_config(tmp_path / "weights-00000099", init_lora_weights="unknown")
    under_way = await begin(client)
    with pytest.raises(ModelError, match="vLLM refuses"):
        await client.update_weights(published)
    cut_short(tmp_path / "weights-00000099")
    with pytest.raises(ModelError, match="is damaged"):
        await client.update_weights(published)
    versions.check(await make_group(client), before)
    assert not under_way.done() and client.restarts == 0
    under_way.cancel()


class Core:
    """The part of vLLM's core that holds adapters."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def add_lora(self, request: dict[str, Any]) -> None:
        self.held[request["lora_int_id"]] = request["lora_path"]

    def remove_lora(self, number: int) -> None:
        del self.held[number]


async def test_unused_adapters_are_dropped_and_the_oldest_one_blocks_a_full_core():
    core, adapters = Core(), LoraAdapters(dict, 3)
    for version, place in ((1, "a"), (2, "b"), (2, "b-again")):
        assert adapters.oldest_in_the_way() is None
        adapters.load(core, Path(place), version)
    assert core.held == {1: "a", 2: "b", 3: "b-again"}, "a version that is published twice takes two adapters"
    assert adapters.oldest_in_the_way() == 1
    adapters.drop_unused(core, {None, 2})
    assert (core.held, adapters.oldest_in_the_way()) == ({2: "b", 3: "b-again"}, None)
    adapters.current = None  # full weights are served
    adapters.drop_unused(core, {None})
    assert core.held == {}
