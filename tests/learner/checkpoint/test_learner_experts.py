"""Mixtures of experts: they are published and exported by the hub's names, which engines and other readers know."""

from pathlib import Path

import pytest
import torch
from learner_rig import LORA, make_boot, random_groups
from safetensors import safe_open

from ftis_node.errors import ModelError
from ftis_node.generation.engines.published import check_adapter, check_published, load_in_place, shapes_in
from ftis_node.learner.checkpoint.export import export_policy
from ftis_node.learner.learner import Learner
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.workers.hub_names import hub_tensors
from ftis_node.workers.shared_tensors import OpenedWeights
from ftis_node.workers.tensor_file import checksums_of
from ftis_node.workers.weight_store import probe_logprobs
from tests import cpu_sharing
from tests.models.tiny_experts import CONFIGS, save_experts


@pytest.fixture(scope="module", params=CONFIGS)
def folder(tmp_path_factory, request):
    return save_experts(tmp_path_factory.mktemp("experts") / request.param, request.param)


def names_in(path):
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("lora", [None, LORA])
def test_versions_and_exports_have_the_names_of_the_folder(folder, tmp_path, lora):
    names = names_in(folder / "model.safetensors")
    learner = Learner(make_boot(folder, tmp_path, lora=lora, learning_rate=1e-2))
    for number in (1, 2):  # the first step of an adapter changes one of its two matrices
        reply = learner.train(random_groups(seed=number), step=number)
    assert names_in(reply.weights.path) == names
    shapes, optional = shapes_in(resolve_model(str(folder)))
    check_published(Path(reply.weights.path), shapes, optional=optional)
    served = load_causal_lm(resolve_model(str(folder)), dtype="float32")
    assert reply.proof.rms_difference(probe_logprobs(served, reply.proof.probe_ids)) > 1e-3
    held = load_in_place(served, Path(reply.weights.path))
    assert held == reply.weights.checksums
    assert reply.proof.rms_difference(probe_logprobs(served, reply.proof.probe_ids)) < 1e-5

    export_policy(learner.policy, tmp_path / "out", merge=True)
    assert names_in(tmp_path / "out" / "model.safetensors") == names
    exported = load_causal_lm(resolve_model(str(tmp_path / "out")))
    assert reply.proof.rms_difference(probe_logprobs(exported, reply.proof.probe_ids)) < 1e-5


def test_a_4_bit_base_with_experts_is_refused(folder):
    with pytest.raises(ModelError, match="is a mixture of experts, which --quantize 4bit excludes"):
        load_causal_lm(resolve_model(str(folder)), dtype="float32", quantize="4bit")


def test_an_adapter_changes_layers_that_every_reader_of_peft_knows(folder, tmp_path):
    from peft import PeftModel

    learner = Learner(make_boot(folder, tmp_path, lora=LORA, learning_rate=1e-2, publish_as="adapter"))
    for number in (1, 2):
        reply = learner.train(random_groups(seed=number), step=number)
    shapes, _ = shapes_in(resolve_model(str(folder)))
    check_adapter(Path(reply.weights.path).parent, shapes, max_rank=4)
    assert not [name for name in names_in(reply.weights.path) if "experts" in name or ".gate." in name]
    export_policy(learner.policy, tmp_path / "out", merge=False)
    adapted = PeftModel.from_pretrained(load_causal_lm(resolve_model(str(folder))), tmp_path / "out")
    assert reply.proof.rms_difference(probe_logprobs(adapted, reply.proof.probe_ids)) < 1e-5


def test_experts_are_shared_in_memory_without_a_copy(tmp_path, monkeypatch):
    cpu_sharing.install(monkeypatch.setattr)
    folder = save_experts(tmp_path / "model", "qwen3_moe")
    learner = Learner(make_boot(folder, tmp_path, transfer="ipc"))
    weights = learner.train(random_groups(), step=1).weights
    opened = OpenedWeights(torch.device("cpu"))
    opened.open(weights.shared)
    seen = dict(opened.tensors())
    assert seen.keys() == names_in(folder / "model.safetensors") and checksums_of(seen) == weights.checksums
    opened.close()


def test_names_of_a_dense_model_and_of_a_fused_file_stay(tmp_path, model_folder):
    dense = load_causal_lm(resolve_model(str(model_folder)))
    own = dense.state_dict()
    assert all(value is own[name] for name, value in hub_tensors(dense, own).items())
    folder = save_experts(tmp_path / "model", "qwen3_moe")
    load_causal_lm(resolve_model(str(folder))).save_pretrained(tmp_path / "fused", save_original_format=False)
    (tmp_path / "fused" / "tokenizer.json").touch()
    fused = load_causal_lm(resolve_model(str(tmp_path / "fused")))
    assert hub_tensors(fused, fused.state_dict()).keys() == names_in(tmp_path / "fused" / "model.safetensors")
