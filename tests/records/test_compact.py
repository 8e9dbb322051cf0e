"""The compact codecs and the flat arrays of tokens: exact or within 1/512 nat, and safe to unpack."""

import tracemalloc
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.stubs.wire_groups import random_group
from ftis_node.config.manifest import Codec
from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import (
    CODECS,
    MAX_TOKENS,
    pack_group,
    pack_ids,
    pack_logprobs,
    unpack_any,
    unpack_group,
    unpack_ids,
    unpack_logprobs,
)
from ftis_node.records.envelope import announce_group, seal_group
from ftis_node.records.token_batch import TokenBatch
from tests.conftest import make_completion, make_group


@pytest.mark.parametrize(("codec", "most"), [("exact", 8.25), ("lossless", 6.0), ("lossy", 3.5)])
def test_a_token_takes_at_most_the_documented_number_of_bytes(identity, codec, most):
    """The worst case: ids from the whole vocabulary of Qwen, log-probs with random mantissas.

    The envelope and the announcement both count.
    """
    group = random_group(identity, 100_000, np.random.default_rng(0))
    envelope = seal_group(group, identity, codec=codec)
    data = envelope.to_bytes()
    announcement = announce_group(envelope, group, envelope_bytes=len(data)).to_bytes()
    assert (len(data) + len(announcement)) / group.num_tokens <= most


def test_a_lossless_group_is_read_unchanged(identity):
    special = np.array([-0.0, 1e-3, -np.inf, np.nan, -1e-45], dtype=np.float32)
    completion = replace(make_completion(1, -3, 2**31 - 1, 151_664, 0), logprobs=special)
    group = make_group(identity, completions=(completion, make_completion(7, 2)))
    again = unpack_group(pack_group(group, codec="lossless"))
    assert again == group
    for mine, theirs in zip(group.completions, again.completions, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert theirs.logprobs.dtype == np.float32
        assert (mine.finish_reason, mine.reward) == (theirs.finish_reason, theirs.reward)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_ids_are_read_unchanged(ids):
    assert unpack_ids(pack_ids(np.array(ids, dtype="<i4")), len(ids)).tolist() == ids


@pytest.mark.parametrize(("largest", "num_planes"), [(0, 1), (255, 1), (256, 2), (151_664, 3), (2**24, 4), (-1, 4)])
def test_ids_take_as_many_planes_as_the_largest_has_bytes(largest, num_planes):
    assert len(pack_ids(np.array([0, largest], dtype="<i4"))) == num_planes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-255.9375, 0, width=32), min_size=1, max_size=50))
def test_the_error_of_a_lossy_logprob_is_at_most_1_512_nat(values):
    array = np.array(values, dtype="<f4")
    again = unpack_logprobs(pack_logprobs(array, lossy=True), len(values), lossy=True)
    assert np.abs(again.astype(np.float64) - array).max() <= 1 / 512
    assert again.dtype == np.float32
    assert unpack_logprobs(pack_logprobs(again, lossy=True), len(values), lossy=True).tolist() == again.tolist()


def test_lossy_logprobs_are_clipped_to_the_scale_and_nan_is_refused():
    array = np.array([1e-3, 0.0, -300.0, -np.inf, -255.99], dtype="<f4")
    lowest = -65535 / 256
    again = unpack_logprobs(pack_logprobs(array, lossy=True), 5, lossy=True)
    assert again.tolist() == [0.0, 0.0, lowest, lowest, -65533 / 256]
    with pytest.raises(ValueError, match="NaN"):
        pack_logprobs(np.array([np.nan], dtype="<f4"), lossy=True)


def test_every_codec_has_a_name_in_the_manifest():
    assert get_args(Codec) == tuple(CODECS)


def test_a_codec_that_the_run_does_not_accept_is_refused_by_name(identity):
    body = pack_group(make_group(identity), codec="lossy")
    with pytest.raises(RecordError, match="'lossy', this run takes exact, lossless") as caught:
        unpack_any(body, codecs=("exact", "lossless"))
    assert caught.value.reason == "codec"


def _frame(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


BOMB = _frame(bytes(1 << 30))
WITHOUT_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(5))
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"
WITH_DICTIONARY = zstandard.ZstdCompressor(
    dict_data=zstandard.train_dictionary(1024, [bytes([n, 1, n]) * 9 for n in range(250)]), level=1
).compress(bytes(5))
# the header declares 5 bytes of content; the block repeats a byte 2^17 times
WRONG_SIZE = bytes.fromhex("28b52ffd2005") + (1 | 1 << 1 | (1 << 17) << 3).to_bytes(3, "little") + b"\0"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.id_planes.__setitem__(0, BOMB), "malformed"),
        (lambda b: b.logprob_planes.__setitem__(0, BOMB), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, WRONG_SIZE), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, WITHOUT_SIZE), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, SKIPPABLE), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, WITH_DICTIONARY), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, _frame(bytes(4))), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, _frame(bytes(6))), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, b.id_planes[0] + b"\0"), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, b.id_planes[0] + SKIPPABLE), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, b.id_planes[0] + b.id_planes[0]), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, b.id_planes[0][:-1]), "malformed"),
        (lambda b: b.id_planes.__setitem__(0, b""), "malformed"), (lambda b: b.ClearField("id_planes"), "malformed"),
        (lambda b: b.id_planes.extend([_frame(bytes(5))] * 4), "malformed"),
        (lambda b: b.logprob_planes.append(_frame(bytes(5))), "malformed"),
        (lambda b: b.ClearField("logprob_planes"), "malformed"),
        (lambda b: setattr(b, "token_ids", bytes(20)), "malformed"),
        (lambda b: setattr(b, "logprobs", bytes(20)), "malformed"),
        (lambda b: b.lengths.__setitem__(0, MAX_TOKENS), "size"),
        (lambda b: b.lengths.__setitem__(0, 2**32 - 1), "size"), (lambda b: b.lengths.__setitem__(0, 4), "malformed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("codec", ["lossless", "lossy"])
def test_an_invalid_plane_is_refused_and_takes_no_memory(identity, codec, change, reason):
    body = pb.Body.FromString(pack_group(make_group(identity), codec=codec))
    change(body)
    data = body.SerializeToString()
    tracemalloc.start()
    with pytest.raises(RecordError) as caught:
        unpack_group(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.reason == reason
    assert peak < len(data) + (1 << 20)


@pytest.mark.parametrize(("place", "most"), [(0, 31), (2, 7)])
def test_a_plane_with_bits_of_another_is_refused(place, most):
    frames = [_frame(bytes(3))] * 3
    for value in (most, most + 1):
        frames[place] = _frame(bytes([0, value, 0]))
        if value == most:
            unpack_logprobs(frames, 3, lossy=True)
        else:
            with pytest.raises(RecordError, match="more bits"):
                unpack_logprobs(frames, 3, lossy=True)


def test_more_tokens_than_a_reader_accepts_are_not_packed():
    with pytest.raises(ValueError, match="at most"):
        pack_ids(np.zeros(MAX_TOKENS + 1, dtype="<i4"))


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
