"""Completions that are not trained on: of peers with understated log-probs, and without an end (`mask_truncated`)."""

import math
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from learner_rig import flat_gradient, logprobs_by_row, make_boot, make_group, random_groups, with_tokens
from tiny_models import make_model

from ftis_node.config.manifest import SamplingSection
from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.groups import unpack_train_group
from ftis_node.learner.learner import Learner
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.train_step import Passes
from ftis_node.node.training.step_groups import TrainGroupBuilder
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.identity import Identity
from ftis_node.replay.stored_rows import StoredGroup
from tests import conftest

LIMIT = 16.0
LARGE_RATE, NUM_UPDATES = 0.03, 5


@pytest.fixture
def groups():
    """Return an own group and a foreign one, both with a signal."""
    own, foreign = random_groups(num_groups=2, seed=3)
    return own, msgspec.structs.replace(foreign, own=False)


def understating(group, *, at):
    """Return the group with log-probs of -40 in completion `at`."""
    tokens = unpack_train_group(group).tokens
    rows = np.repeat(np.arange(len(tokens)), tokens.lengths)
    return with_tokens(group, logprobs=np.where(rows == at % len(tokens), np.float32(-40.0), tokens.logprobs))


def report_after(model_folder, home, groups, **changes):
    boot = make_boot(model_folder, home, **{"max_logprob_gap_nats": LIMIT, "method": "tis"} | changes)
    return Learner(boot).train(groups, step=1).report


@pytest.mark.parametrize(("at", "micro_batch_tokens"), [(0, 1 << 20), (-1, 1)])
def test_an_understated_foreign_group_is_excluded_and_reported(model_folder, tmp_path, groups, at, micro_batch_tokens):
    own, foreign = groups
    false, size = [own, understating(foreign, at=at)], {"micro_batch_tokens": micro_batch_tokens}
    report = report_after(model_folder, tmp_path / "a", false, **size)
    assert report.understated == (foreign.group_id,)
    assert report.num_updates == 1
    without = msgspec.structs.replace(foreign, rewards=(1.0,) * len(foreign.rewards))
    expected = report_after(model_folder, tmp_path / "b", [own, without], **size)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4), "as if it had no signal"
    accepted = report_after(model_folder, tmp_path / "c", false, max_logprob_gap_nats=math.inf, **size)
    assert accepted.understated == ()
    assert accepted.grad_norm != pytest.approx(expected.grad_norm, rel=1e-2)


def test_honest_and_own_groups_are_accepted(model_folder, tmp_path, groups):
    own, foreign = groups
    assert report_after(model_folder, tmp_path / "a", [own, foreign]).understated == ()
    assert report_after(model_folder, tmp_path / "b", [understating(own, at=0), foreign]).understated == ()


@pytest.mark.parametrize("of_own_weights", [False, True], ids=["a claim", "by this node's generator"])
def test_a_claim_of_own_weights_does_not_exempt_a_group(model_folder, tmp_path, of_own_weights):
    """A group of a peer names this node as the owner of the weights that sampled it."""
    peer, ours = Identity.from_seed(bytes([2]) * 32), Identity.from_seed(bytes([9]) * 32)
    group = conftest.make_group(peer, weights_of=ours.peer_id, versions=(0, 0))
    completions = tuple(replace(c, logprobs=np.full_like(c.logprobs, -13.0)) for c in group.completions)
    envelope = seal_group(group.with_completions(completions), peer)
    stored = StoredGroup.from_accepted(Accepted(envelope, envelope.to_bytes(), group, (5, 6, 7)), own=False)
    taken = TrainGroupBuilder("vertical").build(stored, of_own_weights=of_own_weights)
    assert (taken.sender, taken.own) == (peer.peer_id, False)
    report = report_after(model_folder, tmp_path, [taken])
    assert report.understated == (taken.group_id,)
    assert (report.own_groups, report.foreign_groups) == (0, 1)
    assert (report.mismatch_kl is not None) is of_own_weights


def test_only_the_first_pass_detects_understated_log_probs(model_folder, tmp_path, groups):
    """Large updates on one batch raise some completions by more than the limit."""

    def trained(home, limit):
        updates = {"updates_per_batch": NUM_UPDATES, "learning_rate": LARGE_RATE}
        learner = Learner(make_boot(model_folder, home, method="cispo", max_logprob_gap_nats=limit, **updates))
        report = learner.train(groups, step=1).report
        assert (report.num_updates, report.understated) == (NUM_UPDATES, ())
        return learner

    without_limit, with_limit = trained(tmp_path / "a", math.inf), trained(tmp_path / "b", LIMIT)
    batch = make_batch(groups)
    after = Passes(with_limit.policy.logprobs, batch, make_micro_batches(batch, max_tokens=1 << 20)).logprobs()
    objective = Objective("cispo", {}, max_logprob_gap_nats=LIMIT)
    assert objective.understated(after, batch).any(), "after the updates they are above the limit"
    pairs = zip(without_limit.policy.trainable().values(), with_limit.policy.trainable().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_kl_moves_no_excluded_group_and_no_token_by_more_than_the_cap(groups, weighted):
    """The log-probs of all tokens are 1 below the starting model's. A peer reports -40 in its first completion."""
    own, foreign = groups
    batch = make_batch([own, understating(foreign, at=0)])
    learner = torch.where(batch.is_own[:, None], batch.behaviour_logprobs, -5.5).requires_grad_()

    def gradient(limit):
        options = {"kl_to_start": 1.0, "kl_weighted": weighted, "max_logprob_gap_nats": limit}
        objective, no_signal = Objective("nois", {"cap": 3.0, "agg": "token_mean"}, **options), batch.rewards * 0
        excluded, reference = objective.excluded(learner, batch), learner.detach() - 1
        loss, _ = objective.loss(learner, batch, no_signal, first_pass=None, reference=reference, excluded=excluded)
        assert torch.equal(objective.may_train(batch, no_signal, excluded), ~excluded)
        return torch.autograd.grad(loss, learner)[0] * batch.num_tokens

    one = 1.0 if weighted else 1 - math.exp(-1)
    assert gradient(LIMIT)[~batch.is_own].tolist() == [[0.0] * batch.mask.shape[1]] * 4
    assert gradient(LIMIT)[batch.mask & batch.is_own[:, None]].numpy() == pytest.approx(one)
    first = int(batch.is_own.sum())
    assert gradient(math.inf)[first, 0].item() == pytest.approx(3.0 if weighted else one)


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
