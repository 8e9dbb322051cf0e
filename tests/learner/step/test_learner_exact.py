"""Loss and gradient of every method equal those of a naive float64 implementation: padded rows, full logits, one graph.

The learner's code runs twice. In float64 packing, shared prompts, micro-batches and the head's gradient must agree up
to rounding of float64. In float32 a log-prob of -6, and so its ratio, is rounded at the seventh digit.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_rig import flat_gradient, random_groups
from tiny_models import make_model
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from ftis_node.algorithms import group_advantages, policy_loss
from ftis_node.algorithms.methods import METHODS, method_parameters
from ftis_node.learner.batch import make_batch, make_packed_micro_batches
from ftis_node.learner.model import attention
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.train_step import Passes

PARAMS = {
    "dr_grpo": {"max_completion_length": 90}, "ftis": {"kl_threshold": 0.05},
    "f-nois": {"kl_threshold": 0.05, "denominator": "kept"}, "gepo": {"k3_beta": 0.005},
}  # fmt: skip


@pytest.fixture(scope="module")
def groups():
    return random_groups(num_groups=4, group_size=4, max_length=90, prompt_lengths=(3, 70, 20))


@pytest.fixture(scope="module")
def models():
    attention.register()
    made = {torch.float64: double_model(), torch.float32: make_model(seed=1)}
    for model in made.values():
        model.set_attn_implementation(attention.ATTENTION)
    return made


def double_model():
    """Return a model that computes in float64 only. The norm of transformers would compute in float32."""
    model = make_model(seed=1).double()
    for module in model.modules():
        if isinstance(module, Qwen2RMSNorm):
            module.forward = partial(norm, module.weight, module.variance_epsilon)
    return model


def norm(weight, epsilon, hidden):
    return weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon)


@pytest.fixture(scope="module")
def naive_logprobs(groups):
    """Return the model and its log-probs, `[N, T]` float64, by a log-softmax over all logits of a padded batch."""
    model, batch = double_model(), make_batch(groups)
    texts = [np.concatenate(pair) for pair in zip(batch.prompts, batch.completions, strict=True)]
    width = max(map(len, texts))
    ids, mask = torch.zeros(len(texts), width, dtype=torch.int64), torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text.astype(np.int64)), 1
    logprobs = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1], dim=-1)
    taken = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    rows = [
        taken[row, len(prompt) - 1 : len(prompt) - 1 + len(completion)]
        for row, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions, strict=True))
    ]
    return model, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_loss_and_gradient_equal_the_naive_ones(models, naive_logprobs, groups, method):
    batch = make_batch(groups)
    params = PARAMS.get(method, {})
    objective = Objective(method, params)
    naive, logprobs = naive_logprobs
    scale, senders = objective.scale, batch.sender_ids
    read = {"sender_ids": senders} if "sender_ids" in method_parameters(method) else {}
    advantages = group_advantages(batch.rewards, batch.advantage_ids, scale=scale, sender_ids=senders)
    behaviour = batch.behaviour_logprobs.double()
    loss, _ = policy_loss(method, logprobs, behaviour, batch.mask, advantages, batch.group_ids, **params, **read)
    naive.zero_grad()
    loss.backward(retain_graph=True)
    expected = flat_gradient(naive)
    assert expected.norm() > 1e-3
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 3e-6)):
        model = models[dtype]
        model.zero_grad()
        exact = replace(batch, behaviour_logprobs=batch.behaviour_logprobs.to(dtype))
        micro_batches = make_packed_micro_batches(exact, max_tokens=400)
        assert len(micro_batches) > 1
        found = Passes(partial(completion_logprobs, model), exact, micro_batches).gradients(objective)
        assert found.loss == pytest.approx(loss.item(), rel=tolerance, abs=tolerance * 0.1)
        assert (flat_gradient(model) - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize(("method", "weights"), [("accepted", [1.0, 1.0]), ("ftis", [0.5, 2.0])])
def test_accepted_gives_completions_of_other_tokenizers_full_weight(method, weights):
    means = torch.tensor([-2.0, -1.0]).double()
    batch = SimpleNamespace(behaviour_means=torch.tensor([-1.3068528, -9.0]))  # less log 0.5
    assert Objective(method, {})._text_weights(means, batch).tolist() == pytest.approx(weights)
