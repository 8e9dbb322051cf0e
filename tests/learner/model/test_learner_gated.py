"""Gated blocks that save half of their activations compute the same values and gradients."""

import torch
from learner_rig import make_boot
from tiny_models import make_model
from torch.autograd.graph import saved_tensors_hooks

from ftis_node.config.workers import LoraSection
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.model.policy import save_memory
from ftis_node.learner.model.policy_loading import load_policy

WIDE = 128  # the tiny models' feed-forward width


def gradients(model):
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def num_wide_kept(run, num_positions):
    """Return the result of `run`, and the number of feed-forward activations saved for the backward pass."""
    kept = set()

    def keep(tensor):
        if tensor.shape[-1:] == (WIDE,) and tensor.numel() == WIDE * num_positions:
            kept.add(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return result, len(kept)


def test_values_and_gradients_are_the_same(micro_batch):
    plain, saving = make_model(), make_model()
    assert save_memory(saving) == 2
    num_positions = micro_batch.token_ids.numel()
    expected, num_kept = num_wide_kept(lambda: completion_logprobs(plain, micro_batch), num_positions)
    assert num_kept == 2 * 4
    found, num_kept = num_wide_kept(lambda: completion_logprobs(saving, micro_batch), num_positions)
    assert num_kept == 2 * 2
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    ours, theirs = gradients(saving), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-6 * gradient.norm()


def test_values_and_gradients_are_the_same_with_an_adapter(model_folder, tmp_path, micro_batch):
    policy = load_policy(make_boot(model_folder, tmp_path, lora=LoraSection(rank=4, alpha=8)))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = policy.logprobs(micro_batch)
    ours.sum().backward()
    saved = {name: gradient.clone() for name, gradient in gradients(policy.causal_lm).items()}
    policy.causal_lm.zero_grad()
    for module in policy.causal_lm.modules():
        module.__dict__.pop("forward", None)  # restores the method of the class
    expected = policy.logprobs(micro_batch)
    assert torch.equal(ours, expected)
    expected.sum().backward()
    theirs = gradients(policy.causal_lm)
    assert saved.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (saved[name] - gradient).norm() <= 1e-6 * gradient.norm()


def test_another_activation_is_not_changed():
    model = make_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    assert save_memory(model) == 0
