"""The text codec: a text group is read as it was written; inconsistent bodies are refused by reason."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import MAX_TEXT_BYTES
from ftis_node.records.codec import pack_group, pack_text_group, unpack_any, unpack_group
from ftis_node.records.group import FinishReason, Group, TextCompletion, TextGroup
from ftis_node.records.identity import Identity
from tests.conftest import make_group, make_text_group


def test_every_field_is_read_unchanged(identity):
    group = make_text_group(identity)
    assert unpack_any(pack_text_group(group)) == group


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=50), st.floats(-50, 0, width=32), st.integers(1, 2**32 - 1))
def test_texts_are_read_unchanged(text, mean, num_tokens):
    completion = TextCompletion(text, mean_logprob=mean, num_tokens=num_tokens, finish_reason=FinishReason.ABORT)
    group = make_text_group(Identity.from_seed(bytes(32)), completions=(completion,))
    (again,) = unpack_any(pack_text_group(group)).completions
    assert (again.text, again.num_tokens) == (text, num_tokens)
    assert again.mean_logprob == pytest.approx(mean, rel=1e-6)


def test_each_reader_accepts_its_own_form_only(identity):
    exact, text = pack_group(make_group(identity)), pack_text_group(make_text_group(identity))
    assert isinstance(unpack_any(exact), Group)
    assert isinstance(unpack_any(text), TextGroup)
    for reader, other in ((unpack_group, text), (partial(unpack_any, codecs=()), exact)):
        with pytest.raises(RecordError) as caught:
            reader(other)
        assert caught.value.reason == "codec"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: setattr(b, "codec", 0), "codec"),
        (lambda b: b.texts.append("one more"), "malformed"),
        (lambda b: b.ClearField("texts"), "malformed"),
        (lambda b: b.mean_logprobs.append(-1.0), "malformed"),
        (lambda b: b.lengths.__setitem__(0, 0), "malformed"),
        (lambda b: b.finishes.__setitem__(0, 9), "malformed"),
        (lambda b: setattr(b, "exact_group", b"short"), "malformed"),
        (lambda b: setattr(b, "token_ids", b"\0\0\0\0"), "malformed"),
        (lambda b: setattr(b, "logprobs", b"\0\0\0\0"), "malformed"),
        (lambda b: b.version_offsets.extend([0, 0]), "malformed"),
        (lambda b: b.version_spans.extend([1, 1]), "malformed"),
        (lambda b: b.texts.__setitem__(0, "x" * (MAX_TEXT_BYTES + 1)), "malformed"),
    ],
)
def test_an_inconsistent_body_is_refused_by_reason(identity, change, reason):
    body = pb.Body.FromString(pack_text_group(make_text_group(identity)))
    change(body)
    with pytest.raises(RecordError) as caught:
        unpack_any(body.SerializeToString())
    assert caught.value.reason == reason


def test_a_text_that_is_not_utf8_is_refused(identity):
    valid = pack_text_group(make_text_group(identity))
    invalid = valid.replace("naïve".encode(), b"na\xff\xffve")
    assert len(invalid) == len(valid)
    assert invalid != valid
    with pytest.raises(RecordError) as caught:
        unpack_any(invalid)
    assert caught.value.reason == "parse"
