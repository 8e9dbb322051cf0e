"""Training that begins with an adapter: it continues from its weights, or merges them first."""

import json

import pytest
import torch
from learner_rig import make_boot, random_groups
from safetensors.torch import load_file
from tiny_models import save_adapter

from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError
from ftis_node.learner.checkpoint.export import export_policy
from ftis_node.learner.core import Learner
from ftis_node.learner.model.policy_loading import load_policy, load_reference
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.workers.weight_store import probe_logprobs

LORA = LoraSection(rank=4, alpha=8)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model_folder):
    return save_adapter(tmp_path_factory.mktemp("adapters") / "tuned", model_folder)


@pytest.mark.parametrize("lora", [LORA, None])
def test_version_0_is_the_model_with_its_adapter(adapter, model_folder, tmp_path, lora):
    served = load_causal_lm(resolve_model(str(adapter)), dtype="float32")
    state = Learner(make_boot(adapter, tmp_path, lora=lora)).state()
    assert state.weights is None
    assert state.proof.rms_difference(probe_logprobs(served, state.proof.probe_ids)) < 1e-5
    base = load_causal_lm(resolve_model(str(model_folder)))
    assert state.proof.rms_difference(probe_logprobs(base, state.proof.probe_ids)) > 0.01


def test_training_changes_the_layers_of_the_adapter_and_continues_from_its_values(adapter, tmp_path):
    learner = Learner(make_boot(adapter, tmp_path, lora=LORA, learning_rate=1e-3))
    before = load_file(adapter / "adapter_model.safetensors")
    learner.train(random_groups(), step=1)
    export_policy(learner.policy, tmp_path / "out", merge=False)
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    changes = [(after[name] - before[name]).abs().max() for name in before]
    assert 0 < max(changes) < 0.01
    config, saved = (json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "out", adapter))
    for key in ("r", "lora_alpha", "base_model_name_or_path"):
        assert config[key] == saved[key]
    assert config["lora_dropout"] == 0
    proof = learner.state().proof
    again = load_causal_lm(resolve_model(str(tmp_path / "out")))
    assert proof.rms_difference(probe_logprobs(again, proof.probe_ids)) < 1e-5
    resumed = Learner(make_boot(adapter, tmp_path, lora=LORA))
    assert resumed.state().proof == proof


def test_the_reference_is_the_model_with_the_first_adapter(adapter, tmp_path, micro_batch):
    policy = load_policy(make_boot(adapter, tmp_path, lora=LORA))
    reference = load_reference(policy, make_boot(adapter, tmp_path, lora=LORA))
    with torch.no_grad():
        first = policy.logprobs(micro_batch)
        memory = {name: value.data_ptr() for name, value in policy.trainable().items()}
        for value in policy.trainable().values():
            value.mul_(2)
        later = policy.logprobs(micro_batch)
    assert (later - first).abs().max() > 0.01
    assert torch.equal(reference(micro_batch), first)
    assert torch.equal(policy.logprobs(micro_batch), later)
    assert {name: value.data_ptr() for name, value in policy.trainable().items()} == memory


def test_a_home_of_the_base_is_not_one_of_the_adapter(adapter, model_folder, tmp_path):
    Learner(make_boot(model_folder, tmp_path, lora=LORA)).train(random_groups(), step=1)
    with pytest.raises(ConfigError, match="trains"):
        Learner(make_boot(adapter, tmp_path, lora=LORA))
