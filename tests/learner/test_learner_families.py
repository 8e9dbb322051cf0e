"""Every family of models in `families.py` is trained, served, updated and exported, as its row says."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers
from families import FAMILIES, SIZES, Family
from generation_support import make_request
from generation_vllm_support import RemoteEngine
from learner_rig import make_boot
from tiny_models import VOCAB_SIZE, make_tokenizer

from bench.stubs.random_models import own_group, pack_train_group
from ftis_node.config.workers import LoraSection
from ftis_node.errors import EngineError, WorkerTaskError
from ftis_node.generation.engines.base import Engine, EngineSettings
from ftis_node.generation.engines.torch_engine import open_engine
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.learner.batch import batch_of
from ftis_node.learner.checkpoint.export import export_policy
from ftis_node.learner.groups import UnpackedGroup
from ftis_node.learner.learner import Learner
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.workers.weight_store import probe_logprobs

TOLERANCE = 1e-3  # nats; the largest difference seen is 3e-6
SETTINGS = EngineSettings(vocab_size=VOCAB_SIZE, dtype="float32", device="cpu", seed=0, max_model_len=128, max_batch=16)
IDS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 60).astype("<i4")
PROMPTS = (IDS[:5], IDS[:45], IDS[40:57])  # of different length; two share tokens, one is longer than a window

by_name = {"ids": lambda family: family.prefix}


def save(family: Family, folder: Path) -> Path:
    """Write a random model of the family, whose logits have ordinary sizes."""
    config = getattr(transformers, f"{family.prefix}Config")(**SIZES | family.settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1 if config.tie_word_embeddings else 3)
    assert sum(value.numel() for value in model.parameters()) < 1_000_000
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


async def generate(engine: Engine | RemoteEngine) -> list[UnpackedGroup]:
    """Return a group of each prompt, generated side by side, with rewards 0 and 1."""
    limits = {"eos_ids": frozenset({2}), "seed": None}
    requests = [make_request(ids.tolist(), max_tokens=28 - 7 * n, **limits) for n, ids in enumerate(PROMPTS)]
    results = await asyncio.gather(*map(engine.generate, requests))
    return [
        own_group(str(number), prompt, result.tokens, (0.0, 1.0, 0.0, 1.0))
        for number, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True))
    ]


@torch.no_grad()
def gap(learner: Learner, groups: list[UnpackedGroup]) -> float:
    """Return the largest difference, in nats, of the learner's log-probs from the engine's."""
    batch = batch_of(groups)
    found = torch.zeros(batch.mask.numel())
    for micro_batch in learner.policy.micro_batches(batch, 2048):
        found[micro_batch.cell_index] = learner.policy.logprobs(micro_batch)
    return float((found.view(batch.mask.shape) - batch.behaviour_logprobs)[batch.mask].abs().max())


async def train(learner: Learner, engine: Engine | RemoteEngine, *, steps: int) -> None:
    """Train on what the engine generates, update it after each step, and compare log-probs."""
    for step in range(1, steps + 2):
        groups = await generate(engine)
        assert gap(learner, groups) < TOLERANCE
        if step <= steps:
            before = learner.state().proof.logprobs
            reply = learner.train([pack_train_group(group) for group in groups], step=step)
            assert reply.report.num_updates == 1
            assert max(np.abs(np.subtract(learner.state().proof.logprobs, before))) > 10 * TOLERANCE
            await engine.load_weights(Path(reply.weights.path), step)
            if isinstance(engine, RemoteEngine):
                await check(engine, learner)


def make_learner(folder: Path, home: Path, **changes: Any) -> Learner:
    return Learner(make_boot(folder, home, learning_rate=3e-3, **changes))


@pytest.mark.parametrize("family", FAMILIES, **by_name)
async def test_the_torch_engine_and_the_learner_agree_while_a_family_is_trained(tmp_path, caplog, family):
    folder = save(family, tmp_path / "model")
    learner = make_learner(folder, tmp_path)
    assert learner.policy.packs == family.packs
    assert ("times the positions of packed rows" in caplog.text) == (not family.packs)
    engine = await open_engine(resolve_model(str(folder)), SETTINGS, lambda: None)
    await train(learner, engine, steps=1)
    await engine.close()
    export_policy(learner.policy, tmp_path / "out", merge=True)
    exported = load_causal_lm(resolve_model(str(tmp_path / "out")), device="cpu")
    proof = learner.state().proof
    assert np.abs(np.subtract(probe_logprobs(exported, proof.probe_ids), proof.logprobs)).max() < 1e-5


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.lora], **by_name)
async def test_a_family_is_trained_with_an_adapter(tmp_path, family):
    folder = save(family, tmp_path / "model")
    learner = make_learner(folder, tmp_path, lora=LoraSection(rank=4, alpha=64))
    engine = await open_engine(resolve_model(str(folder)), SETTINGS, lambda: None)
    await train(learner, engine, steps=1)
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tmp_path_factory):
    """A process that opens one engine of vLLM after another."""
    engine = RemoteEngine(tmp_path_factory.mktemp("engine"))
    await engine.start()
    yield engine
    await engine.stop()


async def check(engine: RemoteEngine, learner: Learner) -> None:
    """Raise EngineError as `GenerationClient.check_start` and the proof of new weights do."""
    proof = learner.state().proof
    if proof.rms_difference(await engine.probe(proof.probe_ids)) > PROOF_TOLERANCES["float32"]:
        raise EngineError("the engine vllm differs from the learner")


@pytest.mark.timeout(180)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("family", sorted(FAMILIES, key=lambda family: (bool(family.vllm), family.name)), **by_name)
async def test_vllm_serves_a_family_while_it_is_trained_or_is_refused(tmp_path, vllm, family):
    folder = save(family, tmp_path / "model")
    learner = make_learner(folder, tmp_path)
    with pytest.raises((EngineError, WorkerTaskError), match=family.vllm) if family.vllm else nullcontext():
        await vllm.open(folder, SETTINGS)
        await check(vllm, learner)
        await train(learner, vllm, steps=1)
