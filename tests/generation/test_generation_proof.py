"""The proof of new weights: correct engines pass it in every version, and each fault is found every time.

A `WeightLoader` calls a real `Service` in the same process, with the torch engine and faults in its loading.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_support import EMBEDDING_ROWS, SETTINGS, file_tensors, tiny_model

from ftis_node.generation.engines import published as published_file
from ftis_node.generation.engines.torch_engine import TorchEngine
from ftis_node.generation.weight_loader import PROOF_TOLERANCES, WeightLoader
from ftis_node.generation.worker import Service
from ftis_node.workers.tensor_file import read_tensors
from ftis_node.workers.weight_store import PublishedWeights, WeightProof, find_difference, prove, publish_weights

Tensors = dict[str, torch.Tensor]


async def problem_of_loading(
    folder: Path, engine: Any, weights: PublishedWeights, proof: WeightProof, *, dtype: str
) -> str:
    """Return the problem of the first load, "" if it passes."""
    problems: list[str] = []
    loader = WeightLoader(proof_tolerance=PROOF_TOLERANCES[dtype], on_problem=problems.append)
    handlers = Service(engine).handlers()
    to_come = asyncio.get_running_loop().create_future()
    to_come.set_result(proof)
    await loader.load(lambda request, _: handlers[type(request)](request, None), weights, to_come)
    return next(iter(problems), "")


def exchanged(tensors: Mapping[str, torch.Tensor], one: str, other: str) -> Tensors:
    """Exchange the tensors whose names contain `one` with those whose names contain `other`."""
    names = {one: other, other: one}

    def taken(name: str) -> str:
        part = next((part for part in names if part in name), "")
        return name.replace(part, names[part]) if part else name

    return {name: tensors[taken(name)] for name in tensors}


def heads_exchanged(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Rotate the queries of the attention heads by one head: the numbers and so the checksum stay equal."""
    name = "model.layers.0.self_attn.q_proj.weight"
    return {**tensors, name: tensors[name].roll(16, dims=0)}


FAULTS: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "layer": lambda now, before: exchanged(now, "layers.0.", "layers.1."),
    "head": lambda now, before: exchanged(now, "model.embed_tokens.", "lm_head."),
    "attention heads": lambda now, before: heads_exchanged(now),
    "stale": lambda now, before: before,
}
GROSS = ("layer", "head", "attention heads")  # the faults that the log-probs show
EXACT = ("layer", "head", "stale")  # the faults that the checksums show


@pytest.mark.parametrize(
    ("fault", "dtype"), [*((fault, "bfloat16") for fault in ("nothing", *FAULTS)), ("stale", "float32")]
)
async def test_faults_in_loading_are_found(tmp_path, monkeypatch, fault, dtype):
    """The torch engine loads the weights of a real optimizer step of 1e-6, correctly and with each fault."""
    kind = getattr(torch, dtype)
    engine = TorchEngine(tiny_model(tied=False).to(kind), SETTINGS)
    learner = tiny_model(tied=False, seed=1)
    before = read_tensors(Path(publish_weights(tmp_path, 1, file_tensors(learner), dtype=kind).path))
    take_optimizer_step(learner)
    weights = publish_weights(tmp_path, 2, file_tensors(learner), dtype=kind)
    proof = prove(learner.to(kind), version=2, vocab_size=EMBEDDING_ROWS)
    if fault in FAULTS:
        monkeypatch.setattr(published_file, "read_tensors", lambda path, **_: FAULTS[fault](read_tensors(path), before))
    problem = await problem_of_loading(tmp_path, engine, weights, proof, dtype=dtype)
    held = await engine.load_weights(Path(weights.path), 2)
    rms = proof.rms_difference(await engine.probe(proof.probe_ids))
    await engine.close()
    assert set(held) == set(weights.checksums) == set(file_tensors(learner)), "a tensor is not compared"
    assert bool(problem) == (fault in FAULTS)
    assert (find_difference(weights.checksums, held) is not None) == (fault in EXACT)
    if dtype == "bfloat16":
        assert (rms > PROOF_TOLERANCES[dtype]) == (fault in GROSS)


def take_optimizer_step(model: Any) -> None:
    """Take one step of AdamW at the learning rate of a run."""
    ids = torch.arange(40)[None] % EMBEDDING_ROWS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
