"""Training that begins with an adapter, and the KL to the initial model, also after a resume."""

import json

import pytest
import torch
from learner_rig import LORA, logprobs_by_row, make_boot, random_groups, sample_group
from safetensors.torch import load_file
from tiny_models import save_adapter

from ftis_node.errors import ConfigError
from ftis_node.learner.batch import make_batch
from ftis_node.learner.checkpoint.export import export_policy
from ftis_node.learner.learner import Learner
from ftis_node.learner.model.policy_loading import load_policy, load_reference
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.workers.weight_store import probe_logprobs


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


BETA = 0.25


@torch.no_grad()
def kl_by_hand(model, start, groups):
    """Return the mean over each completion's tokens, then over completions, as in GRPO."""
    batch = make_batch(groups)
    ratios = (logprobs_by_row(start, batch).double() - logprobs_by_row(model, batch)).masked_fill(~batch.mask, 0.0)
    k3 = ratios.exp() - ratios - 1
    return ((k3 * batch.mask).sum(dim=1) / batch.mask.sum(dim=1)).mean().item()


@pytest.mark.parametrize(("lora", "micro_batch_tokens"), [(None, 8192), (LORA, 40)])
def test_the_kl_is_relative_to_the_initial_model_also_after_a_resume(model_folder, tmp_path, lora, micro_batch_tokens):
    start = load_causal_lm(resolve_model(str(model_folder)))
    how = {"learning_rate": 1e-2, "kl_coef": BETA, "method": "nois", "micro_batch_tokens": micro_batch_tokens}
    learner = Learner(boot := make_boot(model_folder, tmp_path, lora=lora, **how))
    first = learner.train(random_groups(seed=1), step=1).report
    assert first.kl_to_start == pytest.approx(0.0, abs=1e-9)
    assert learner.policy.trainable(), "the adapter is trainable after peft disabled it"
    for step in (2, 3):
        groups = random_groups(seed=step)
        expected = kl_by_hand(learner.policy.causal_lm, start, groups)
        assert expected > 1e-3
        report = learner.train(groups, step=step).report
        assert report.kl_to_start == pytest.approx(expected, rel=1e-4)
        assert report.loss == pytest.approx(BETA * expected, rel=1e-3, abs=1e-6), "advantages of a group sum to 0"
        assert report.num_updates == 1
        learner = Learner(boot)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_drift_is_measured_on_what_the_starting_model_sampled_also_after_a_resume(model_folder, tmp_path, lora):
    """It is the k3 estimate of KL(start || policy) over all tokens of the first two groups."""
    start = load_causal_lm(resolve_model(str(model_folder)))
    boot = make_boot(model_folder, tmp_path, lora=lora, learning_rate=1e-2)
    learner = Learner(boot)
    assert learner._start is None, "no second model in memory"
    sampled = [
        sample_group(start, group_size=4, length=6, reward=lambda ids: float(ids[0] < 150), number=number, seed=number)
        for number in range(3)
    ]
    assert learner.train(sampled, step=1).report.kl_from_start is None
    batch = make_batch(sampled[:2])
    for step in range(2, 8):
        with torch.no_grad():
            present, first = (logprobs_by_row(model, batch).double() for model in (learner.policy.causal_lm, start))
        ratios = (present - first)[batch.mask]
        expected = (ratios.exp() - ratios - 1).mean().item()
        report = learner.train(random_groups(seed=step), step=step).report
        assert report.kl_from_start == (pytest.approx(expected, rel=1e-4) if step in (2, 7) else None)
        assert report.kl_to_start is None and expected > 1e-3
        if step == 4:
            learner.close()
            learner = Learner(boot)
