"""Batches and micro-batches of padded rows, and packed rows: each prompt once, each token attends to its own text."""

import pytest
import torch
from learner_rig import flat_gradient, logprobs_by_row, make_group, random_groups, unpacked_group
from tiny_models import make_model

from ftis_node.learner.batch import batch_of, make_batch, make_micro_batches, make_packed_micro_batches
from ftis_node.learner.model import attention
from ftis_node.learner.model.logprobs import completion_logprobs


def test_a_batch_by_hand():
    groups = [
        make_group(
            *([[7], [8, 9, 10]], [0.0, 1.0]),
            **{"number": 0, "key": "q1", "version": 4, "newest": 5, "logprobs": [[-1.0], [-2.0, -3.0, -4.0]]},
        ),
        make_group([[11, 12]], [0.5], number=1, key="q1", own=False, logprobs=[[-5.0, -6.0]]),
        make_group([[13]], [1.0], number=2, key="q2", own=False, logprobs=[[-7.0]]),
    ]
    batch = make_batch(groups)
    assert batch.behaviour_logprobs.tolist() == [[-1, 0, 0], [-2, -3, -4], [-5, -6, 0], [-7, 0, 0]]
    assert batch.mask.tolist() == [[True, False, False], [True] * 3, [True, True, False], [True, False, False]]
    assert batch.rewards.tolist() == [0, 1, 0.5, 1]
    assert batch.group_ids.tolist() == [0, 0, 1, 2]  # completions of one generator for one prompt
    assert batch.advantage_ids.tolist() == [0, 0, 0, 1]  # in the horizontal mode the first two groups have one key
    assert batch.is_own.tolist() == [True, True, False, False]
    assert batch.sender_ids.tolist() == [0, 0, 1, 2], "a group without a name is a separate sender"
    assert batch.policy_versions.tolist() == [4, 4, 0, 0]
    assert batch.policy_versions_newest.tolist() == [5, 5, 0, 0]
    assert (batch.num_own_groups, batch.num_foreign_groups, batch.num_tokens) == (1, 2, 7)


def test_senders_have_one_id_each_and_this_node_zero():
    labels = [("b", False), ("me", True), ("a", False), ("b", False), ("", False), ("", True)]
    groups = [
        make_group([[1], [2]], [0.0, 1.0], number=number, own=own, sender=sender)
        for number, (sender, own) in enumerate(labels)
    ]
    assert make_batch(groups).sender_ids[::2].tolist() == [1, 0, 2, 1, 3, 0]


def test_a_micro_batch_by_hand():
    batch = make_batch([make_group([[7], [8, 9, 10]], [0.0, 1.0], prompt=(1, 2))])
    (micro_batch,) = make_micro_batches(batch, max_tokens=100)
    assert micro_batch.token_ids.tolist() == [[1, 2, 8, 9, 10], [1, 2, 7, 0, 0]]
    assert micro_batch.predictor_index.tolist() == [1, 2, 3, 6]  # the token before each completion token
    assert micro_batch.target_ids.tolist() == [8, 9, 10, 7]
    assert micro_batch.cell_index.tolist() == [3, 4, 5, 0]  # the second row of [2, 3], then one cell of the first


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_micro_batches_keep_the_budget_and_every_token(max_tokens):
    batch = make_batch(random_groups(num_groups=7, group_size=5))
    micro_batches = make_micro_batches(batch, max_tokens=max_tokens)
    cells = [cell for micro_batch in micro_batches for cell in micro_batch.cell_index.tolist()]
    assert sorted(cells) == batch.mask.flatten().nonzero().flatten().tolist()
    for micro_batch in micro_batches:
        num_rows, num_columns = micro_batch.token_ids.shape
        assert num_rows * num_columns <= max_tokens or num_rows == 1
    widths = [micro_batch.token_ids.shape[1] for micro_batch in micro_batches]
    assert widths == sorted(widths, reverse=True)
    if max_tokens == 1:
        assert len(micro_batches) == 35
    if max_tokens == 10_000:
        assert len(micro_batches) == 1


def test_an_empty_batch_has_no_micro_batches():
    batch = make_batch([])
    assert batch.mask.shape == (0, 0)
    assert make_micro_batches(batch, max_tokens=10) == []


@pytest.mark.parametrize("fault", [{"logprobs": [[-1.0, -2.0]]}, {"prompt": ()}])
def test_an_inconsistent_group_is_named(fault):
    with pytest.raises(ValueError, match="group group-3 cannot be trained on"):
        make_batch([make_group([[1, 2, 3]], [1.0], number=3, **fault)])


@pytest.fixture(scope="module")
def model():
    model = make_model(tied=True)
    attention.register()
    model.set_attn_implementation(attention.ATTENTION)
    return model


def test_the_layout_of_a_packed_row_by_hand():
    groups = [
        make_group([[7, 8, 9], [10, 11]], [0.0, 1.0], prompt=(1, 2)),
        make_group([[20, 21]], [0.0], number=1, prompt=(3, 4)),
    ]
    (micro_batch,) = make_packed_micro_batches(make_batch(groups), max_tokens=100)
    # A completion's last token predicts nothing.
    assert micro_batch.token_ids.tolist() == [[1, 2, 7, 8, 10, 3, 4, 20]]
    assert micro_batch.positions.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    prompt = range(0, 2)
    assert micro_batch.texts == ((prompt, range(2, 4)), (prompt, range(4, 5)), (range(5, 7), range(7, 8)))
    assert micro_batch.predictor_index.tolist() == [1, 2, 3, 1, 4, 6, 7]
    assert micro_batch.target_ids.tolist() == [7, 8, 9, 10, 11, 20, 21]
    assert micro_batch.cell_index.tolist() == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_rows_keep_the_budget_and_every_token(max_tokens):
    batch = make_batch(random_groups(num_groups=7, group_size=5))
    micro_batches = make_packed_micro_batches(batch, max_tokens=max_tokens)
    cells = [cell for micro_batch in micro_batches for cell in micro_batch.cell_index.tolist()]
    assert sorted(cells) == batch.mask.flatten().nonzero().flatten().tolist()
    for micro_batch in micro_batches:
        spans = sorted({span for text in micro_batch.texts for span in text}, key=lambda span: span.start)
        ends = [span.stop for span in spans]
        assert [span.start for span in spans] == [0, *ends[:-1]]  # spans cover the row without gaps
        assert ends[-1] == micro_batch.token_ids.shape[1]
        assert ends[-1] <= max_tokens or len(micro_batch.texts) == 1  # a completion longer than the budget
    if max_tokens == 1:
        assert len(micro_batches) == 35
    if max_tokens == 10_000:
        assert len(micro_batches) == 1


def test_completions_without_tokens_have_no_place():
    batch = batch_of([unpacked_group([[], [7]], [0.0, 1.0], prompt=(1, 2)), unpacked_group([[]], [0.0], number=1)])
    (micro_batch,) = make_packed_micro_batches(batch, max_tokens=100)
    assert (micro_batch.token_ids.tolist(), micro_batch.cell_index.tolist()) == ([[1, 2]], [1])
    assert make_packed_micro_batches(make_batch([]), max_tokens=10) == []


def logprobs_and_gradients(model, batch, micro_batches):
    model.zero_grad()
    matrix = torch.zeros(batch.mask.numel())
    weights = torch.randn(batch.mask.numel(), generator=torch.Generator().manual_seed(1))
    for micro_batch in micro_batches:
        logprobs = completion_logprobs(model, micro_batch)
        matrix[micro_batch.cell_index] = logprobs.detach()
        (logprobs * weights[micro_batch.cell_index]).sum().backward()
    return matrix, flat_gradient(model)


@pytest.mark.parametrize(("max_tokens", "max_length"), [(90, 1), (90, 20), (100_000, 150)])  # one and several buckets
def test_packed_rows_equal_single_completions(model, max_tokens, max_length):
    groups = random_groups(num_groups=5, group_size=4, max_length=max_length, prompt_lengths=(3, 70, 9))
    batch = make_batch(groups)
    packed = make_packed_micro_batches(batch, max_tokens=max_tokens)
    ours, our_gradient = logprobs_and_gradients(model, batch, packed)
    _, gradient = logprobs_and_gradients(model, batch, make_micro_batches(batch, max_tokens=1))
    with torch.no_grad():
        assert (ours.view(batch.mask.shape) - logprobs_by_row(model, batch)).abs().max() < 1e-5
    assert (our_gradient - gradient).norm() < 3e-6 * gradient.norm()


def test_padded_rows_equal_those_of_a_plain_model(model):
    plain = make_model(tied=True)
    (micro_batch,) = make_micro_batches(make_batch(random_groups()), max_tokens=10_000)
    with torch.no_grad():
        assert torch.equal(completion_logprobs(model, micro_batch), completion_logprobs(plain, micro_batch))


def test_attention_of_another_kind_is_refused(model):
    query = torch.zeros(1, 4, 3, 8)
    plan = attention.AttentionPlan.of([(range(0, 3),)], torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="its attention has sinks"):
        attention.attend(None, query, query, query, None, plan=plan, s_aux=torch.zeros(4))
