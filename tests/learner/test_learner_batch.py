"""Batches and micro-batches of padded rows."""

import pytest
from learner_rig import make_group, random_groups

from ftis_node.learner.batch import make_batch, make_micro_batches


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
    assert micro_batch.cell_index.tolist() == [
        3,
        4,
        5,
        0,
    ]  # the second row of [2, 3], then the first cell of the first row


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
