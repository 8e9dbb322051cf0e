"""The exact codec and the text codec: a group is read as it was written; inconsistent bodies are refused by reason."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import MAX_TEXT_BYTES
from ftis_node.records.codec import pack_group, pack_text_group, unpack_any, unpack_group
from ftis_node.records.envelope import open_envelope, seal_group
from ftis_node.records.group import FinishReason, Group, SamplingSettings, TextCompletion, TextGroup
from ftis_node.records.identity import Identity
from tests.conftest import make_completion, make_group, make_text_group


def test_every_field_is_read_unchanged(identity):
    group = make_group(
        identity,
        sampling=SamplingSettings(temperature=0.7, top_p=0.95, top_k=20),
        completions=(
            make_completion(1, 2, reward=0.95, versions=(3, 5)),
            make_completion(-3, 2**31 - 1, 4, versions=(4, 4)),
        ),
    )
    again = unpack_group(pack_group(group))
    assert again == group
    for mine, theirs in zip(group.completions, again.completions, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert (mine.finish_reason, mine.reward) == (theirs.finish_reason, theirs.reward)
    assert _versions(again) == [(3, 5), (4, 4)]


def _versions(group: Group) -> list[tuple[int, int]]:
    return [(completion.policy_version, completion.policy_version_newest) for completion in group.completions]


def test_an_unknown_field_is_ignored(identity):
    body = pack_group(make_group(identity))
    unknown_field_500 = b"\xa2\x1f\x03new"
    assert unpack_group(body + unknown_field_500).number == 1


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**63 - 1 - 2**32),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**31 - 1)), min_size=1, max_size=6),
)
def test_policy_versions_are_read_unchanged(oldest, offsets_and_spans):
    versions = [(oldest + offset, oldest + offset + span) for offset, span in offsets_and_spans]
    group = make_group(
        Identity.from_seed(bytes(32)), completions=tuple(make_completion(1, versions=pair) for pair in versions)
    )
    again = unpack_group(pack_group(group))
    assert _versions(again) == versions
    assert again.policy_version == min(first for first, _ in versions)
    assert again.policy_version_newest == max(last for _, last in versions)


@pytest.mark.parametrize("versions", [(3, 3), (3, 5)])
def test_versions_that_all_completions_share_take_no_bytes(versions):
    body = pack_group(make_group(Identity.from_seed(bytes(range(32))), created_at=1.5, versions=versions))
    fields = pb.Body.FromString(body)
    assert not fields.version_offsets and not fields.version_spans
    assert _versions(unpack_group(body)) == [versions, versions]


def test_a_newest_version_below_the_oldest_or_too_far_above_is_not_packed(identity):
    for versions in ((4, 3), (3, 3 + 2**32)):
        with pytest.raises(ValueError, match="out of range"):
            pack_group(make_group(identity, versions=versions))


def _body(identity: Identity, change: Callable[[pb.Body], None]) -> bytes:
    body = pb.Body.FromString(pack_group(make_group(identity)))
    change(body)
    return body.SerializeToString()


def _set_versions(body: pb.Body, *, span: int, offsets: list[int], spans: list[int]) -> None:
    body.policy_version_span = span
    body.version_offsets.extend(offsets)
    body.version_spans.extend(spans)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "run", b"short"),
        lambda b: setattr(b, "sender", b"x" * 38),  # of the right length, but no peer id
        lambda b: setattr(b, "sender", b"x" * 37),
        lambda b: setattr(b, "task", "t" * 129),
        lambda b: setattr(b, "number", 2**63),
        lambda b: setattr(b, "created_ms", 2**63),
        lambda b: setattr(b, "prompt_index", 2**63),
        lambda b: setattr(b, "policy_version", 2**63),
        lambda b: (setattr(b, "policy_version", 2**63 - 1), setattr(b, "policy_version_span", 1)),
        lambda b: b.ClearField("lengths"),
        lambda b: b.lengths.append(1),
        lambda b: b.lengths.__setitem__(0, 0),
        lambda b: b.lengths.__setitem__(0, 2**32 - 1),
        lambda b: b.finishes.__setitem__(0, 9),
        lambda b: setattr(b, "logprobs", b.logprobs[:-4]),
        lambda b: setattr(b, "token_ids", b.token_ids + b"\0\0\0\0"),
        lambda b: b.rewards.append(1.0),
        lambda b: _set_versions(b, span=2, offsets=[0, 1], spans=[0, 0]),  # none has the newest version
        lambda b: _set_versions(b, span=2, offsets=[0, 1], spans=[0, 2]),  # a version above the newest
        lambda b: _set_versions(b, span=2, offsets=[0, 2**32 - 1], spans=[2, 2**32 - 1]),
        lambda b: _set_versions(b, span=2, offsets=[1, 1], spans=[0, 1]),  # none has the oldest version
        lambda b: _set_versions(b, span=2, offsets=[0, 1], spans=[]),
        lambda b: _set_versions(b, span=2, offsets=[], spans=[0, 2]),
        lambda b: _set_versions(b, span=2, offsets=[0], spans=[2]),
        lambda b: _set_versions(b, span=2, offsets=[0, 0, 0], spans=[0, 2, 0]),
        lambda b: _set_versions(b, span=2, offsets=[0, 0], spans=[0, 2, 0]),
    ],
)
def test_an_inconsistent_body_is_malformed(identity, change):
    data = _body(identity, change)
    with pytest.raises(RecordError) as caught:
        unpack_group(data)
    assert caught.value.reason == "malformed"


def test_the_size_is_checked_before_parsing():
    with pytest.raises(RecordError) as caught:
        open_envelope(b"\xff" * 101, max_bytes=100)
    assert caught.value.reason == "size"


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_changed_byte_invalidates_the_signature(data):
    identity = Identity.from_seed(bytes(32))
    valid = seal_group(make_group(identity), identity).to_bytes()
    position = data.draw(st.integers(0, len(valid) - 1))
    changed = bytearray(valid)
    changed[position] ^= data.draw(st.integers(1, 255))
    try:
        envelope = open_envelope(bytes(changed))
        group = unpack_group(envelope.body)
    except RecordError:
        return
    assert not envelope.is_signed_by(identity.peer_id) or envelope.body == open_envelope(valid).body
    assert group.completions


def test_every_field_of_a_text_group_is_read_unchanged(identity):
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
def test_an_inconsistent_body_of_texts_is_refused_by_reason(identity, change, reason):
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
