"""The KL to the initial model, for full training and for an adapter, also after a resume."""

import pytest
import torch
from learner_rig import logprobs_by_row, make_boot, random_groups, sample_group

from ftis_node.config.workers import LoraSection
from ftis_node.learner.batch import make_batch
from ftis_node.learner.core import Learner
from ftis_node.models import load_causal_lm, resolve_model

LORA = LoraSection(rank=4, alpha=8)
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
