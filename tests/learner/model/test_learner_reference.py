"""The KL to the initial model, for full training and for an adapter, also after a resume."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from learner_rig import as_text, make_boot, one_by_one_logprobs, random_groups
from msgspec.structs import replace
from tiny_models import make_model

from ftis_node.config.workers import LoraSection
from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.core import Learner
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.step.objective import make_objective
from ftis_node.learner.step.train_step import compute_gradients
from ftis_node.models import load_causal_lm, resolve_model

LORA = LoraSection(rank=4, alpha=8)
BETA = 0.25


def logprobs_of(model, batch):
    rows = [
        one_by_one_logprobs(model, prompt.tolist(), ids.tolist())
        for prompt, ids in zip(batch.prompts, batch.completions, strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).double()


@torch.no_grad()
def kl_by_hand(model, start, groups):
    """Return the mean over each completion's tokens, then over completions, as in GRPO."""
    batch = make_batch(groups)
    ratios = (logprobs_of(start, batch) - logprobs_of(model, batch)).masked_fill(~batch.mask, 0.0)
    k3 = ratios.exp() - ratios - 1
    return ((k3 * batch.mask).sum(dim=1) / batch.mask.sum(dim=1)).mean().item()


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("micro_batch_tokens", [8192, 40])
def test_the_kl_is_relative_to_the_initial_model_also_after_a_resume(model_folder, tmp_path, lora, micro_batch_tokens):
    start = load_causal_lm(resolve_model(str(model_folder)))
    boot = make_boot(
        model_folder,
        tmp_path,
        lora=lora,
        learning_rate=1e-2,
        kl_coef=BETA,
        method="nois",
        micro_batch_tokens=micro_batch_tokens,
    )
    learner = Learner(boot)
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


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_kl_term_keeps_the_model_near_its_start(model_folder, tmp_path, lora):
    start = load_causal_lm(resolve_model(str(model_folder)))
    distances = {}
    for beta in (0.0, 10.0):
        boot = make_boot(
            model_folder, tmp_path / str(beta), lora=lora, learning_rate=1e-3, kl_coef=beta, updates_per_batch=8
        )
        learner = Learner(boot)
        for step in (1, 2, 3):
            report = learner.train(random_groups(seed=9), step=step).report
        assert (report.kl_to_start is None) == (beta == 0)
        distances[beta] = kl_by_hand(learner.policy.causal_lm, start, random_groups(seed=9))
    assert distances[10.0] < 0.5 * distances[0.0]


def test_full_training_without_a_kl_term_loads_no_reference_model(model_folder, tmp_path):
    assert Learner(make_boot(model_folder, tmp_path))._reference is None


def sent_as_text(group):
    """Return the group as a peer with another tokenizer sends it."""
    return replace(as_text(group, [-5.5] * len(group.rewards)), own=False)


@pytest.mark.parametrize("with_texts", [False, True], ids=["tokens", "texts"])
@pytest.mark.parametrize(("method", "agg"), [("ftis", "seq_mean"), ("dapo", "token_mean"), ("dr_grpo", "max_len")])
def test_loss_and_gradient_have_the_weighted_kl_of_every_row(method, agg, with_texts):
    """The test compares with the formula in float64. The KL also counts filtered rows and rows of text."""
    groups = random_groups(num_groups=3, distance=3.0)
    batch = make_batch([*groups[:2], sent_as_text(groups[2]) if with_texts else groups[2]])
    random = torch.Generator().manual_seed(3)
    learner, start = (-5 + torch.randn(batch.mask.shape, generator=random, dtype=torch.float64) for _ in range(2))
    params = {"max_completion_length": 12, "kl_threshold": 0.5}
    objective = make_objective(method, params, kl_to_start=BETA)
    advantages, found = objective.advantages(batch), []
    for reference in (None, start):
        leaf = learner.clone().requires_grad_()
        loss, metrics = objective.loss(leaf, batch, advantages, first_pass=None, reference=reference)
        found.append((loss.item(), torch.autograd.grad(loss, leaf)[0], metrics))
    (plain, plain_gradient, without), (loss, gradient, metrics) = found

    lengths = batch.mask.sum(dim=1, keepdim=True).double()
    num_completions = len(lengths)
    weights = {
        "seq_mean": 1.0 / (num_completions * lengths),
        "token_mean": 1.0 / lengths.sum(),
        "max_len": torch.ones_like(lengths) / (num_completions * 12),
    }[agg] * batch.mask
    ratios = start - learner
    kl = (weights * (ratios.exp() - ratios - 1)).sum().item()
    assert loss == pytest.approx(plain + BETA * kl, rel=1e-12)
    assert metrics == without | {"kl_to_start": pytest.approx(kl, rel=1e-12)}
    by_hand = plain_gradient + BETA * weights * (1 - ratios.exp())
    torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-16)
    if method == "ftis":
        is_filtered = (plain_gradient == 0).all(dim=1)
        assert is_filtered.any()
        assert (gradient[is_filtered] != 0).any(dim=1).all()


@pytest.mark.parametrize("method", ["ftis", "m2po"])
def test_the_gradient_with_a_kl_term_does_not_depend_on_micro_batches(method):
    """`m2po` compares tokens of all completions, so it needs two passes over the model. `ftis` needs one."""
    model, start = make_model(seed=1), make_model(seed=2)
    batch = make_batch(random_groups(num_groups=3))
    objective = make_objective(method, {}, kl_to_start=BETA)
    rows = [
        one_by_one_logprobs(model, prompt.tolist(), ids.tolist())
        for prompt, ids in zip(batch.prompts, batch.completions, strict=True)
    ]
    with torch.no_grad():
        reference = logprobs_of(start, batch).float()
    matrix = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    loss, _ = objective.loss(matrix, batch, objective.advantages(batch), first_pass=None, reference=reference)
    exact = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
    for max_tokens in (10_000, 40):
        model.zero_grad()
        micro_batches = make_micro_batches(batch, max_tokens=max_tokens)
        forward = partial(completion_logprobs, model)
        result = compute_gradients(forward, batch, micro_batches, objective, reference=reference)
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert result.metrics["kl_to_start"] > 0.01
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert (found - exact).norm() < 3e-6 * exact.norm()
