"""The flat token arrays: views, equality, and size checks when bytes are read."""

import numpy as np
import pytest

from ftis_node.errors import RecordError
from ftis_node.records.token_batch import TokenBatch

IDS, LOGPROBS = [[5, 6, 7], [8]], [[-0.5, -0.25, -1.0], [-2.0]]


def test_each_completion_is_a_view_of_the_flat_arrays():
    tokens = TokenBatch.from_parts(IDS, LOGPROBS)
    assert [ids.tolist() for ids in tokens.ids_of_each()] == IDS
    assert [values.tolist() for values in tokens.logprobs_of_each()] == LOGPROBS
    assert all(np.shares_memory(ids, tokens.token_ids) for ids in tokens.ids_of_each())
    assert (len(tokens), tokens.num_tokens, tokens.ends.tolist()) == (2, 4, [3, 4])
    assert tokens.mean_logprobs().tolist() == pytest.approx([-1.75 / 3, -2.0])


def test_a_batch_without_logprobs_has_an_empty_view_per_completion():
    assert [len(values) for values in TokenBatch.from_parts(IDS).logprobs_of_each()] == [0, 0]


def test_batches_are_equal_by_their_contents():
    tokens = TokenBatch.from_parts(IDS, LOGPROBS)
    assert tokens == TokenBatch.from_parts(IDS, LOGPROBS)
    assert tokens != TokenBatch.from_parts([[5, 6], [7, 8]], [[-0.5, -0.25], [-1.0, -2.0]])
    assert tokens != TokenBatch.from_parts(IDS)


def test_a_batch_is_read_from_its_bytes():
    tokens = TokenBatch.from_parts(IDS, LOGPROBS)
    again = TokenBatch.from_bytes(tokens.token_ids.tobytes(), tokens.logprobs.tobytes(), [3, 1])
    assert again == tokens
    assert not again.token_ids.flags.writeable


@pytest.mark.parametrize(
    ("num_id_bytes", "num_logprob_bytes", "lengths"),
    [(12, 16, [3, 1]), (16, 12, [3, 1]), (15, 16, [3, 1]), (16, 16, [2, 1]), (16, 16, [3, 2**32])],
)
def test_sizes_that_disagree_with_the_lengths_are_refused(num_id_bytes, num_logprob_bytes, lengths):
    with pytest.raises(RecordError, match="lengths need"):
        TokenBatch.from_bytes(bytes(num_id_bytes), bytes(num_logprob_bytes), lengths)
