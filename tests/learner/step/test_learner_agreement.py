"""Agreement of gradients by sender, compared with gradients of single senders, on steps of a tiny model."""

import math

import pytest
import torch
from learner_rig import make_boot, make_group, random_groups
from msgspec.structs import replace

from ftis_node.learner.batch import make_batch
from ftis_node.learner.learner import Learner
from ftis_node.learner.step.agreement import MAX_SENDERS, _distances, _slots
from ftis_node.learner.step.objective import Objective

ANN, BOB, EVE = "ann", "bob", "eve"


def learner_of(model_folder, home, **changes):
    return Learner(make_boot(model_folder, home, method="nois", peer_weights="agreement", **changes))


def groups_of_three():
    """Return four own groups, and two of each of two peers with other prompts."""
    groups = random_groups(8, 4, seed=11)
    senders = ["me"] * 4 + [ANN, ANN, BOB, BOB]
    return [replace(group, own=sender == "me", sender=sender) for group, sender in zip(groups, senders, strict=True)]


def gradient_alone(model_folder, home, groups, of):
    """Return the gradient of the last output projection if the other groups have weight 0."""
    learner = learner_of(model_folder, home)
    batch_groups = [group if number in of else replace(group, weight=0.0) for number, group in enumerate(groups)]
    weight = learner.policy.causal_lm.model.layers[-1].self_attn.o_proj.weight
    found = []
    weight.register_post_accumulate_grad_hook(lambda parameter: found.append(parameter.grad.clone()))
    learner.train(batch_groups, step=1)
    return found[-1].flatten()


def test_cosines_equal_those_of_separate_gradients(model_folder, tmp_path):
    groups = groups_of_three()
    alone = {
        name: gradient_alone(model_folder, tmp_path / name, groups, of)
        for name, of in {"own": {0, 1, 2, 3}, "even": {0, 2}, "odd": {1, 3}, ANN: {4, 5}, BOB: {6, 7}}.items()
    }
    cosine = torch.nn.functional.cosine_similarity
    for budget in (4096, 48):  # one micro-batch, and many
        learner = learner_of(model_folder, tmp_path / str(budget), micro_batch_tokens=budget)
        report = learner.train(groups, step=1).report
        assert set(report.agreement) == {ANN, BOB}
        for name in (ANN, BOB):
            assert report.agreement[name] == pytest.approx(float(cosine(alone[name], alone["own"], dim=0)), abs=1e-4)
        among_own = float(cosine(alone["even"], alone["odd"], dim=0))
        assert report.own_agreement == pytest.approx(among_own, abs=1e-4)


def test_distances_equal_those_of_separate_gradients(model_folder, tmp_path):
    """They are of the mean gradient of a sender's completions, whatever weight they had in the step."""
    groups = groups_of_three()
    groups = [*groups[:3], groups[4], *groups[6:]]  # three own ones: halves of unequal size
    parts = {"even": {0, 2}, "odd": {1}, "own": {0, 1, 2}, ANN: {3}, BOB: {4, 5}}
    mean = {
        name: gradient_alone(model_folder, tmp_path / name, groups, of).double() / (4 * len(of))
        for name, of in parts.items()
    }
    variance = float((mean["even"] - mean["odd"]).square().sum()) * 2 / 9
    weighted = [replace(group, weight=1.0 if group.own else 0.25) for group in groups]
    for budget in (4096, 48):
        boot = make_boot(
            model_folder, tmp_path / str(budget), method="nois", peer_weights="shrinkage", micro_batch_tokens=budget
        )
        report = Learner(boot).train(weighted, step=1).report
        assert report.own_agreement == pytest.approx(variance, rel=1e-4)
        for name, size in ((ANN, 1), (BOB, 2)):
            distance = float((mean["own"] - mean[name]).square().sum())
            assert report.agreement[name] == pytest.approx((distance - variance) * size / 3, rel=1e-3)


def test_a_sender_of_inverted_rewards_disagrees(model_folder, tmp_path):
    groups = groups_of_three()

    def copied(group, sender):
        name = f"{group.group_id}-{sender}"
        return replace(group, own=False, sender=sender, group_id=name, advantage_key=name)

    copies = [copied(group, BOB) for group in groups[:4]]
    inverted = [tuple(1.0 - reward for reward in group.rewards) for group in groups[:4]]
    mirrored = [replace(copied(group, EVE), rewards=each) for group, each in zip(groups, inverted, strict=False)]
    report = learner_of(model_folder, tmp_path).train([*groups[:4], *mirrored, *copies], step=1).report
    assert report.agreement == {EVE: pytest.approx(-1.0, abs=1e-5), BOB: pytest.approx(1.0, abs=1e-5)}


def test_weights_scale_the_advantages_of_their_group():
    groups = groups_of_three()
    objective = Objective("nois", {})
    full, halved = (
        objective.advantages(
            make_batch([replace(group, weight=weight) if not group.own else group for group in groups])
        )
        for weight in (1.0, 0.5)
    )
    is_own = make_batch(groups).is_own
    assert torch.equal(halved[is_own], full[is_own])
    assert torch.allclose(halved[~is_own], 0.5 * full[~is_own])
    assert full[~is_own].any()


def test_senders_are_bounded_and_without_a_signal_there_are_no_figures(model_folder, tmp_path):
    learner = learner_of(model_folder, tmp_path)
    own, *others = random_groups(MAX_SENDERS + 4, 2, seed=3, max_length=3)
    peers = [replace(group, own=False, sender=f"peer-{number}") for number, group in enumerate(others)]
    report = learner.train([replace(own, own=True), *peers], step=1).report
    assert len(report.agreement) == MAX_SENDERS
    assert report.own_agreement is None  # one own group cannot be halved
    quiet = [replace(group, weight=0.0) for group in groups_of_three()]
    report = learner.train(quiet, step=2).report
    assert (report.agreement, report.own_agreement, report.skipped) == ({}, None, "no signal")


def test_values_that_are_not_finite_are_no_measurement():
    """A refused step must not enter the means of the peer weights, which would stay NaN."""
    own, others = make_group([[1, 2], [3]], [1.0, 0.0]), make_group([[1, 2], [3]], [1.0, 0.0], own=False)
    batch = make_batch([own, own, replace(others, sender=BOB)])
    ones, broken = torch.ones(2, 2), torch.full((2, 2), math.nan)
    for sums in ({0: broken, 1: ones, 2: ones}, {0: torch.full((2, 2), math.inf), 1: ones, 2: ones}):
        assert _distances(batch, _slots(batch), sums) == ({}, None)
    assert _distances(batch, _slots(batch), {0: ones, 1: ones, 2: broken}) == ({}, 0.0)
