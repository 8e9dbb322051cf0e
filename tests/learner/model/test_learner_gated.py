"""Gated blocks that save half of their activations compute the same values and gradients."""

import pytest
import torch
from learner_rig import make_boot
from tiny_models import make_model
from torch.autograd.graph import saved_tensors_hooks

from ftis_node.config.workers import LoraSection
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.model.lora import lora_layers
from ftis_node.learner.model.policy import save_memory
from ftis_node.learner.model.policy_loading import load_policy

WIDE = 128  # the tiny models' feed-forward width


def values_and_gradients(run, model):
    """Return the log-probs of `run`, and the gradient of their sum to each trained tensor."""
    values = run()
    trained = [value for value in model.parameters() if value.requires_grad]
    return values, torch.autograd.grad(values.sum(), trained)


def check_equal(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def num_wide_kept(run, num_positions):
    """Return the number of feed-forward activations that `run` saves for the backward pass."""
    kept = set()

    def keep(tensor):
        if tensor.shape[-1:] == (WIDE,) and tensor.numel() == WIDE * num_positions:
            kept.add(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return len(kept)


def test_values_and_gradients_are_the_same(micro_batch):
    plain, saving = make_model(), make_model()
    assert save_memory(saving) == 2
    results = []
    for model, num_kept in ((plain, 4), (saving, 2)):

        def run(model=model):
            return completion_logprobs(model, micro_batch)

        assert num_wide_kept(run, micro_batch.token_ids.numel()) == 2 * num_kept
        results.append(values_and_gradients(run, model))
    check_equal(*results)


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_values_and_gradients_are_the_same_with_an_adapter(model_folder, tmp_path, micro_batch, quantize):
    """Also those of the adapter, whose layers add their output as part of a product."""
    policy = load_policy(make_boot(model_folder, tmp_path, lora=LoraSection(rank=4, alpha=8), quantize=quantize))
    assert all("forward" in vars(layer) for layer in lora_layers(policy.causal_lm).values())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = values_and_gradients(lambda: policy.logprobs(micro_batch), policy.causal_lm)
    for module in policy.causal_lm.modules():
        module.__dict__.pop("forward", None)  # restores the method of the class
    check_equal(ours, values_and_gradients(lambda: policy.logprobs(micro_batch), policy.causal_lm), tolerance=1e-4)


def test_another_activation_is_not_changed():
    model = make_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    assert save_memory(model) == 0
