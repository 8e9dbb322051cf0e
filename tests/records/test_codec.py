"""The exact codec: a group is written at 8 bytes per token and read unchanged; invalid bytes are refused by reason."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import pack_group, unpack_group
from ftis_node.records.envelope import open_envelope, seal_group
from ftis_node.records.group import Group, SamplingSettings
from ftis_node.records.identity import Identity
from tests.conftest import make_completion, make_group


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
    ("change", "reason"),
    [
        (lambda b: setattr(b, "run", b"short"), "malformed"),
        (lambda b: setattr(b, "sender", b"x" * 38), "malformed"),  # of the right length, but no peer id
        (lambda b: setattr(b, "sender", b"x" * 37), "malformed"),
        (lambda b: setattr(b, "task", "t" * 129), "malformed"),
        (lambda b: setattr(b, "number", 2**63), "malformed"),
        (lambda b: setattr(b, "created_ms", 2**63), "malformed"),
        (lambda b: setattr(b, "prompt_index", 2**63), "malformed"),
        (lambda b: setattr(b, "policy_version", 2**63), "malformed"),
        (lambda b: (setattr(b, "policy_version", 2**63 - 1), setattr(b, "policy_version_span", 1)), "malformed"),
        (lambda b: b.ClearField("lengths"), "malformed"),
        (lambda b: b.lengths.append(1), "malformed"),
        (lambda b: b.lengths.__setitem__(0, 0), "malformed"),
        (lambda b: b.lengths.__setitem__(0, 2**32 - 1), "malformed"),
        (lambda b: b.finishes.__setitem__(0, 9), "malformed"),
        (lambda b: setattr(b, "logprobs", b.logprobs[:-4]), "malformed"),
        (lambda b: setattr(b, "token_ids", b.token_ids + b"\0\0\0\0"), "malformed"),
        (lambda b: b.rewards.append(1.0), "malformed"),
        (lambda b: _set_versions(b, span=2, offsets=[0, 1], spans=[0, 0]), "malformed"),  # none has the newest version
        (lambda b: _set_versions(b, span=2, offsets=[0, 1], spans=[0, 2]), "malformed"),  # a version above the newest
        (lambda b: _set_versions(b, span=2, offsets=[0, 2**32 - 1], spans=[2, 2**32 - 1]), "malformed"),
        (lambda b: _set_versions(b, span=2, offsets=[1, 1], spans=[0, 1]), "malformed"),  # none has the oldest version
        (lambda b: _set_versions(b, span=2, offsets=[0, 1], spans=[]), "malformed"),
        (lambda b: _set_versions(b, span=2, offsets=[], spans=[0, 2]), "malformed"),
        (lambda b: _set_versions(b, span=2, offsets=[0], spans=[2]), "malformed"),
        (lambda b: _set_versions(b, span=2, offsets=[0, 0, 0], spans=[0, 2, 0]), "malformed"),
        (lambda b: _set_versions(b, span=2, offsets=[0, 0], spans=[0, 2, 0]), "malformed"),
    ],
)
def test_an_inconsistent_body_is_refused_by_reason(identity, change, reason):
    data = _body(identity, change)
    with pytest.raises(RecordError) as caught:
        unpack_group(data)
    assert caught.value.reason == reason


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
