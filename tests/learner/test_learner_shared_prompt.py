"""A row per group gives the log-probs and gradients of a row per completion."""

from __future__ import annotations

import pytest
import torch
from learner_rig import make_group, random_groups
from tiny_models import make_model

from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.logprobs import completion_logprobs
from ftis_node.learner.shared_prompt import MAX_COLUMNS, is_worth_sharing, make_shared_micro_batches


def test_layout_by_hand():
    batch = make_batch([make_group([[7], [8, 9, 10]], [0.0, 1.0], prompt=(1, 2))])
    (micro_batch,) = make_shared_micro_batches(batch, max_tokens=100)
    assert micro_batch.token_ids.tolist() == [[1, 2, 8, 9]]  # a completion's last token predicts nothing
    assert micro_batch.positions.tolist() == [[0, 1, 2, 3]]
    assert micro_batch.predictor_index.tolist() == [1, 1, 2, 3]
    assert micro_batch.target_ids.tolist() == [7, 8, 9, 10]
    assert micro_batch.cell_index.tolist() == [0, 3, 4, 5]


def test_completions_do_not_see_each_other():
    batch = make_batch([make_group([[7, 8, 9], [10, 11, 12]], [0.0, 1.0], prompt=(1, 2))])
    (micro_batch,) = make_shared_micro_batches(batch, max_tokens=100)
    assert micro_batch.positions.tolist() == [[0, 1, 2, 3, 2, 3]]
    assert micro_batch.attends[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def values_and_gradients(model, batch, micro_batches):
    model.zero_grad()
    matrix = torch.zeros(batch.mask.numel())
    weights = torch.randn(batch.mask.numel(), generator=torch.Generator().manual_seed(1))
    for micro_batch in micro_batches:
        logprobs = completion_logprobs(model, micro_batch)
        matrix[micro_batch.cell_index] = logprobs.detach()
        (logprobs * weights[micro_batch.cell_index]).sum().backward()
    return matrix, {name: value.grad.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [130, 100_000])
def test_both_layouts_agree(max_tokens):
    model = make_model(tied=True)
    batch = make_batch(random_groups(num_groups=6, group_size=4, max_length=20))
    shared = make_shared_micro_batches(batch, max_tokens=max_tokens)
    assert (len(shared) > 1) == (max_tokens == 130)
    ours, our_gradients = values_and_gradients(model, batch, shared)
    theirs, their_gradients = values_and_gradients(model, batch, make_micro_batches(batch, max_tokens=max_tokens))
    assert (ours - theirs).abs().max() < 1e-5
    assert ours[batch.mask.flatten()].std() > 0.3
    for name, gradient in our_gradients.items():
        assert (gradient - their_gradients[name]).abs().max() < 1e-4 * their_gradients[name].abs().max() + 1e-6


def test_the_budget_is_kept_and_long_groups_are_left_to_the_other_layout():
    batch = make_batch(random_groups(num_groups=6, group_size=4, max_length=20))
    for micro_batch in make_shared_micro_batches(batch, max_tokens=130):
        assert micro_batch.token_ids.numel() <= 130 or micro_batch.token_ids.shape[0] == 1
    assert make_shared_micro_batches(batch, max_tokens=20) is None
    long = make_batch([make_group([[7] * MAX_COLUMNS], [1.0], prompt=(1, 2))])
    assert make_shared_micro_batches(long, max_tokens=100_000) is None


def test_sharing_pays_where_prompts_are_long_beside_the_answers():
    short_answers = make_group([[7, 8]] * 4, [0.0, 1.0] * 2, prompt=(1, 2, 3, 4, 5, 6))
    long_answers = make_group([[7] * 20] * 4, [0.0, 1.0] * 2, prompt=(1, 2, 3, 4, 5, 6))
    assert is_worth_sharing(make_batch([short_answers]))  # 10 positions for 32
    assert not is_worth_sharing(make_batch([long_answers]))  # 82 for 104
