"""`sampling.mask_truncated`: completions without an end get no gradient, and the report counts them."""

from functools import partial

import pytest
import torch
from learner_rig import flat_gradient, logprobs_by_row, make_boot, make_group
from tiny_models import make_model

from ftis_node.config.manifest import SamplingSection
from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.core import Learner
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.train_step import Passes

BETA, SHIFT = 0.5, 0.25
BEHAVIOUR = -5.5  # of every token of the rig's groups
GROUPS = [
    make_group([[7, 8], [9, 4, 3], [5, 6, 1, 2]], [1.0, 0.0, 0.0], number=0, finish_reasons=("stop", "length", "stop")),
    make_group(
        [[3, 3], [4, 8, 8], [9]], [1.0, 1.0, 0.0], number=1, own=False, finish_reasons=("length", "stop", "abort")
    ),
]
IS_CUT = [False, True, False, True, False, True]


@pytest.mark.parametrize("max_tokens", [10_000, 1])
@pytest.mark.parametrize(("masked", "weighted"), [(False, False), (True, False), (True, True)])
def test_the_gradient_is_that_of_the_other_completions(masked, weighted, max_tokens):
    """Their rewards still count in the mean of the group, and they count in N. Neither loss nor KL moves them.

    The peer's group has a shift of its advantages. If `weighted`, min(rho, 2) weighs the KL of a token.
    """
    model, start, batch = make_model(seed=1), make_model(seed=2), make_batch(GROUPS)
    assert batch.is_cut.tolist() == IS_CUT
    with torch.no_grad():
        reference = logprobs_by_row(start, batch)
    matrices = logprobs_by_row(model, batch), reference, batch.mask
    loss = 0.0
    for row, initial, mask, reward, group, is_cut, is_own in zip(
        *matrices, batch.rewards, batch.group_ids, IS_CUT, batch.is_own, strict=True
    ):
        if not (masked and is_cut):
            advantage = reward - batch.rewards[batch.group_ids == group].mean() + (0.0 if is_own else SHIFT)
            ratio = initial - row
            kl = ratio.exp() - ratio - 1
            if weighted:
                kl = (row - BEHAVIOUR).exp().clamp(max=2.0).detach() * ratio.square() / 2
            loss += (BETA * kl - advantage * row)[mask].mean() / len(IS_CUT)
    exact = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
    options = {"kl_to_start": BETA, "kl_weighted": weighted, "mask_truncated": masked, "advantage_shift": SHIFT}
    objective = Objective("nois", {}, "mean", **options)
    model.zero_grad()

    passes = Passes(partial(completion_logprobs, model), batch, make_micro_batches(batch, max_tokens=max_tokens))
    passes.gradients(objective, reference=reference)
    assert (flat_gradient(model) - exact).norm() < 1e-5 * exact.norm()


def test_the_report_describes_the_completions_of_this_node(model_folder, tmp_path):
    groups = [*GROUPS, make_group([[1, 2, 3]] * 2, [1.0, 1.0], number=2, logprobs=[[-1.0, -2.0, -3.0]] * 2)]
    report = Learner(make_boot(model_folder, tmp_path / "a")).train(groups, step=1).report
    assert report.completion_tokens == pytest.approx((2 + 3 + 4 + 3 + 3) / 5)
    assert report.cut_fraction == pytest.approx(3 / 5), "the rig's groups reach the limit"
    assert report.no_signal_fraction == pytest.approx(1 / 2)
    assert report.entropy == pytest.approx((9 * 5.5 + 12) / 15)
    masking = make_boot(model_folder, tmp_path / "b", sampling=SamplingSection(mask_truncated=True))
    only_cut = [make_group([[7, 8], [9, 4]], [1.0, 0.0], finish_reasons=("length", "length"))]
    masked = Learner(masking).train(only_cut, step=1).report
    assert (masked.skipped, masked.no_signal_fraction) == ("no signal", 1.0)
    foreign = Learner(make_boot(model_folder, tmp_path / "c")).train(GROUPS[1:], step=1).report
    assert foreign.cut_fraction is None and foreign.entropy is None
