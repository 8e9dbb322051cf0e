"""The exact and text codecs, `proto/vectors.json`, and announcements: read as written, or refused by reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import MAX_ENVELOPE_BYTES, MAX_INTEGER, MAX_MORE_GROUPS, MAX_TEXT_BYTES, MAX_TOKENS
from ftis_node.records.codec import CODECS, pack_group, pack_text_group, unpack_any, unpack_group
from ftis_node.records.envelope import (
    MAX_ANNOUNCEMENT_BYTES,
    Announcement,
    join_announcements,
    open_announcement,
    open_envelope,
    seal_group,
)
from ftis_node.records.group import FinishReason, Group, SamplingSettings, TextCompletion, TextGroup
from ftis_node.records.identity import Identity
from tests.conftest import make_completion, make_group, make_text_group

from . import wire_example as example
from .make_vectors import VECTORS, batches, refused, valid


def refuses(reason: str) -> pytest.RaisesExc[RecordError]:
    return pytest.raises(RecordError, check=lambda error: error.reason == reason)


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
    with refuses("malformed"):
        unpack_group(data)


def test_the_size_is_checked_before_parsing():
    with refuses("size"):
        open_envelope(b"\xff" * 101, max_bytes=100)


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
@given(st.text(max_size=50), st.floats(-50, 0, width=32), st.integers(1, MAX_TOKENS))
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
        with refuses("codec"):
            reader(other)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: setattr(b, "codec", 0), "codec"), (lambda b: b.texts.append("one more"), "malformed"),
        (lambda b: b.ClearField("texts"), "malformed"), (lambda b: b.mean_logprobs.append(-1.0), "malformed"),
        (lambda b: b.lengths.__setitem__(0, 0), "malformed"), (lambda b: b.lengths.__setitem__(0, MAX_TOKENS), "size"),
        (lambda b: b.finishes.__setitem__(0, 9), "malformed"),
        (lambda b: setattr(b, "exact_group", b"short"), "malformed"),
        (lambda b: setattr(b, "token_ids", b"\0\0\0\0"), "malformed"),
        (lambda b: setattr(b, "logprobs", b"\0\0\0\0"), "malformed"),
        (lambda b: b.version_offsets.extend([0, 0]), "malformed"),
        (lambda b: b.texts.__setitem__(0, "x" * (MAX_TEXT_BYTES + 1)), "malformed"),
    ],
)  # fmt: skip
def test_an_inconsistent_body_of_texts_is_refused_by_reason(identity, change, reason):
    body = pb.Body.FromString(pack_text_group(make_text_group(identity)))
    change(body)
    with refuses(reason):
        unpack_any(body.SerializeToString())


def test_a_text_that_is_not_utf8_is_refused(identity):
    valid = pack_text_group(make_text_group(identity))
    invalid = valid.replace("naïve".encode(), b"na\xff\xffve")
    assert len(invalid) == len(valid)
    assert invalid != valid
    with refuses("parse"):
        unpack_any(invalid)


PEER = example.IDENTITY.peer_id


def announced(number: int) -> Announcement:
    return Announcement(bytes([number]) * 32, number, 500 + number, 24, b"tokenizr", 3, 1.76e9 + number / 8)


def flat(announcements: list[Announcement]) -> list[Announcement]:
    return [replace(one, more=()) for first in announcements for one in (first, *first.more)]


def test_several_groups_are_read_one_by_one():
    groups = [announced(number) for number in range(1, 31)]
    sent = [announcement.to_bytes() for announcement in join_announcements(groups)]
    assert (len(sent), flat([open_announcement(data) for data in sent])) == (3, groups)


def test_a_batch_of_the_largest_values_fits_in_one_announcement():
    largest = [
        replace(
            announced(number),
            number=MAX_INTEGER - 20 + number,
            envelope_bytes=MAX_ENVELOPE_BYTES if number == 1 else 1 << 14,
            num_tokens=MAX_TOKENS if number == 1 else 1 << 12,
            policy_version=MAX_INTEGER,
            created_at=1.76e9 + number * 60,
        )
        for number in range(1, MAX_MORE_GROUPS + 2)
    ]
    (joined,) = join_announcements(largest)
    assert len(joined.more) == MAX_MORE_GROUPS
    assert len(joined.to_bytes()) <= MAX_ANNOUNCEMENT_BYTES


@pytest.mark.parametrize(
    "change", [{"number": 3}, {"policy_version": 4}, {"tokenizer": b"another1"}, {"attempt": 1}, {"sender": PEER}]
)
def test_groups_that_differ_in_a_shared_field_are_not_joined(change):
    groups = [announced(1), replace(announced(2), **change)]  # type: ignore[arg-type]
    assert join_announcements(groups) == groups


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message.more_ids.append(bytes(32)), lambda message: message.more_ids.__setitem__(0, bytes(31)),
        lambda message: message.more_ids.extend([b""] * MAX_MORE_GROUPS),
        lambda message: message.more_envelope_bytes.__setitem__(0, MAX_ENVELOPE_BYTES + 1),
        lambda message: message.more_num_tokens.__setitem__(0, MAX_TOKENS + 1),
        lambda message: message.more_created_ms.__setitem__(0, 86_400_001),
        lambda message: setattr(message, "number", MAX_INTEGER),
        lambda message: setattr(message, "sender", example.IDENTITY.peer),
    ],
)  # fmt: skip
def test_a_malformed_batch_is_refused(change):
    (batch,) = join_announcements([announced(1), announced(2)])
    message = pb.Announcement.FromString(batch.to_bytes())
    change(message)
    with refuses("malformed"):
        open_announcement(message.SerializeToString())


STORED: dict[str, Any] = json.loads(VECTORS.read_text())


def test_the_file_is_up_to_date_with_its_script():
    """Compressed bytes and their ids may differ, because they depend on the version of zstd."""
    assert (STORED["refused"], STORED["batches"]) == (refused(), batches())
    for old, new in zip(STORED["valid"], json.loads(json.dumps(valid())), strict=True):
        differ = {"envelope", "id"} if old["codec"] in ("lossless", "lossy") else set()
        assert {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} <= differ


def test_every_codec_has_a_vector():
    assert [vector["codec"] for vector in STORED["valid"]] == [*CODECS, "text"]


@pytest.mark.parametrize("vector", STORED["valid"], ids=lambda vector: vector["codec"])
def test_a_valid_envelope_is_read(vector):
    envelope = open_envelope(bytes.fromhex(vector["envelope"]))
    assert envelope.is_signed_by(vector["sender"]) and envelope.id.hex() == vector["id"]
    group = unpack_any(envelope.body)
    assert (group.sender, list(group.rewards)) == (vector["sender"], vector["rewards"])
    if isinstance(group, Group):
        assert [completion.token_ids.tolist() for completion in group.completions] == vector["token_ids"]
        stored = [np.array(row, dtype=np.float32).tolist() for row in vector["logprobs"]]
        assert [completion.logprobs.tolist() for completion in group.completions] == stored
    else:
        assert [completion.text for completion in group.completions] == vector["texts"]
        assert [completion.num_tokens for completion in group.completions] == vector["lengths"]
        assert group.exact_group.hex() == vector["exact_group"] == STORED["valid"][0]["id"]


def test_every_group_of_a_batch_is_read():
    (vector,) = STORED["batches"]
    first = open_announcement(bytes.fromhex(vector["announcement"]))
    for one, group in zip((first, *first.more), vector["groups"], strict=True):
        assert (one.id.hex(), one.number) == (group["id"], group["number"])
        assert (one.envelope_bytes, one.num_tokens) == (group["envelope_bytes"], group["num_tokens"])
        assert round(one.created_at * 1000) == group["created_ms"]
        assert (one.tokenizer.hex(), one.policy_version) == (vector["tokenizer"], vector["policy_version"])


@pytest.mark.parametrize("vector", STORED["refused"], ids=lambda vector: vector["fault"])
def test_an_invalid_envelope_is_refused(vector):
    if vector["reason"] == "signature":
        assert not open_envelope(bytes.fromhex(vector["envelope"])).is_signed_by(STORED["valid"][0]["sender"])
        return
    with refuses(vector["reason"]):
        unpack_any(open_envelope(bytes.fromhex(vector["envelope"])).body)
