"""Every field of every message from a peer has a bound, and a value that a reader returns can be written again.

A test compares the tables of bounds with the schema, so a new field without a bound fails.
"""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.errors import RecordError
from ftis_node.records import peer_messages
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import (
    BODIES,
    GROUP_SOURCE,
    JUDGED,
    MAX_INTEGER,
    MAX_TIME_MS,
    PASS_RATE,
    PEER_STATS,
    RECEIPT,
    REFUSED_SENDER,
    TABLES,
    first_beyond,
    many,
    many_whole,
    seconds,
)
from ftis_node.records.codec import CODECS, pack_group, pack_text_group, unpack_any
from ftis_node.records.envelope import (
    Announcement,
    Envelope,
    PeerRecord,
    open_announcement,
    open_peer_record,
    seal_peer_record,
)
from ftis_node.records.group import Group
from ftis_node.records.identity import ENVELOPE_DOMAIN, Identity
from ftis_node.records.peer_messages import BackfillRequest, open_backfill_request
from ftis_node.swarm.reasons import attribute_refusal
from ftis_node.swarm.reputation import Behaviour
from ftis_node.validation import validate
from tests.conftest import RUN_ID, TOKENIZER, make_group, make_text_group
from tests.records.test_weights import make_offer
from tests.records.wire_example import sign_peer_info, sign_weights_info
from tests.validation.test_pipeline import MANIFEST as EXACT
from tests.validation.test_pipeline import _context, reason_of

ME = Identity.from_seed(bytes(range(32)))
MANIFEST = EXACT.model_copy(update={"wire": EXACT.wire.model_copy(update={"codecs": tuple(CODECS)})})
REASONS = {"size", "parse", "version", "codec", "malformed", "signature"}
ANNOUNCEMENT = Announcement(bytes(32), 1, 278, 5, bytes(8), 3, 1767225600.0, sender=ME.peer_id)
RECORD = PeerRecord(RUN_ID, ME.peer_id, "n", "m", 1, TOKENIZER, "full", 1, 1, 1.0, 1767225600.0, "1")

ARBITRARY = {
    "int": st.one_of(
        st.sampled_from([0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, MAX_TIME_MS, MAX_TIME_MS + 1]),
        st.integers(0, 2**64 - 1),
    ),
    "float": st.floats(width=32),
    "bytes": st.one_of(st.binary(max_size=64), st.sampled_from([bytes(16), bytes(32), bytes(38), ME.peer])),
    "text": st.one_of(st.text(max_size=40), st.just("x" * 1000), st.sampled_from(["full", "learner"])),
}
UINT32, ENUM, STRING, BYTES, FLOAT, MESSAGE = 13, 14, 9, 12, 2, 11  # google.protobuf.FieldDescriptorProto.Type

NESTED = {  # messages in a directory record, with the table of each
    pb.PeerStats: PEER_STATS,
    pb.PassRate: PASS_RATE,
    pb.GroupSource: GROUP_SOURCE,
    pb.RefusedSender: REFUSED_SENDER,
    pb.Receipt: RECEIPT,
}


def arbitrary_field(field: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of one field that protobuf accepts."""
    if field.type == MESSAGE:
        fields = {each.name: arbitrary_field(each) for each in field.message_type.fields}
        message = st.fixed_dictionaries({}, optional=fields)
        return st.lists(message, max_size=2) if field.is_repeated else message
    kind = {STRING: "text", BYTES: "bytes", FLOAT: "float"}.get(field.type, "int")
    value = ARBITRARY[kind]
    if field.type == UINT32:
        value = value.filter(lambda number: number < 2**32)
    if field.type == ENUM:
        value = st.integers(0, 9)
    return st.lists(value, max_size=4) if field.is_repeated else value


def changed(kind: Any, data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for the bytes of the message in `data` with arbitrary values in a few fields."""

    def build(fields: dict[str, Any]) -> bytes:
        message = kind.FromString(data)
        for name in fields:
            message.ClearField(name)
        message.MergeFrom(kind(**fields))
        return bytes(message.SerializeToString())

    arbitrary = {field.name: arbitrary_field(field) for field in kind.DESCRIPTOR.fields if field.name != "schema"}
    names = st.lists(st.sampled_from(sorted(arbitrary)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: arbitrary[name] for name in chosen})).map(build)


RECORD_BODY = pb.PeerRecord.FromString(seal_peer_record(RECORD, ME)).body
OFFER_BODY = pb.WeightsOffer.FromString(peer_messages.seal_offer(make_offer(ME), ME)).body
BACKFILL_REQUEST = BackfillRequest(ME.peer_id, 2, 9, since=1767225600.0).to_bytes()
WEIGHTS_REQUEST = peer_messages.WeightsRequest(peer_messages.WeightsPart.CHUNKS, bytes(32), 1, 2).to_bytes()
READERS: dict[str, tuple[st.SearchStrategy[bytes], Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "announcement": (changed(pb.Announcement, ANNOUNCEMENT.to_bytes()), open_announcement, Announcement.to_bytes),
    "question": (changed(pb.Question, BACKFILL_REQUEST), open_backfill_request, BackfillRequest.to_bytes),
    "record": (
        changed(pb.PeerInfo, RECORD_BODY).map(sign_peer_info),
        open_peer_record,
        lambda record: seal_peer_record(record, ME),
    ),
    "offer": (
        changed(pb.WeightsInfo, OFFER_BODY).map(sign_weights_info),
        peer_messages.open_offer,
        lambda offer: peer_messages.seal_offer(offer, ME),
    ),
    "weights question": (
        changed(pb.WeightsQuestion, WEIGHTS_REQUEST),
        peer_messages.open_weights_request,
        peer_messages.WeightsRequest.to_bytes,
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_value_that_a_reader_returns_can_be_written_and_read_again(name):
    strategy, read, write = READERS[name]

    @settings(max_examples=60, deadline=None)
    @given(strategy)
    def check(data):
        try:
            value = read(data)
        except RecordError as error:
            assert error.reason in REASONS
            return
        assert read(write(value)) == value
        for time_s in (getattr(value, field) for field in ("created_at", "since") if hasattr(value, field)):
            assert BackfillRequest(since=time_s).to_bytes()
            assert datetime.fromtimestamp(time_s, tz=UTC)
        for number in (getattr(value, field, 0) for field in ("number", "last_number", "policy_version", "version")):
            assert (number or 0) <= MAX_INTEGER
            assert BackfillRequest(ME.peer_id, number or 0, number).to_bytes()

    check()


BODY_SEEDS = [*(pack_group(make_group(ME), codec=codec) for codec in CODECS), pack_text_group(make_text_group(ME))]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BODY_SEEDS).flatmap(lambda data: changed(pb.Body, data)))
def test_a_body_that_is_read_can_be_written_again(data):
    try:
        group = unpack_any(data)
    except RecordError as error:
        assert error.reason in REASONS
        return
    again = pack_group(group) if isinstance(group, Group) else pack_text_group(group)
    assert unpack_any(again).created_at == group.created_at


def test_every_field_of_every_message_has_a_bound():
    for kind, table in TABLES.items():
        assert set(table) == {field.name for field in kind.DESCRIPTOR.fields}, kind  # type: ignore[attr-defined]
    for kind, table in NESTED.items():
        assert set(table) == {field.name for field in kind.DESCRIPTOR.fields}, kind
    for codec, table in BODIES.items():
        assert set(table) == {field.name for field in pb.Body.DESCRIPTOR.fields}, codec
    assert {*BODIES, pb.CODEC_UNSPECIFIED} == set(pb.Codec.values())
    in_the_schema = {getattr(pb, name) for name in pb.DESCRIPTOR.message_types_by_name}
    assert in_the_schema == {*TABLES, pb.Body, pb.Sampling, *NESTED}, (
        "a message without a table of bounds cannot be read"
    )


@pytest.mark.parametrize(("role", "known"), [("observer", ""), ("exchange", "exchange"), ("Exchange", "")])
def test_an_unknown_role_is_read_as_none(role, known):
    info = pb.PeerInfo.FromString(RECORD_BODY)
    info.role = role
    assert open_peer_record(sign_peer_info(info.SerializeToString())).role == known


def test_the_largest_time_is_a_valid_date_and_later_ones_are_clipped():
    assert datetime.fromtimestamp(seconds(MAX_TIME_MS), tz=UTC).year == 9999
    last, later = (BackfillRequest(since=seconds(MAX_TIME_MS) * factor).to_bytes() for factor in (1, 10))
    assert later == last


FIELDS_OF_ANOTHER_CODEC = [  # a codec, and fields that it does not have
    ("exact", {"texts": ["junk"]}), ("exact", {"mean_logprobs": [-1.0]}), ("exact", {"exact_group": bytes(32)}),
    ("exact", {"id_planes": [b"junk"]}), ("exact", {"logprob_planes": [b"junk"]}), ("lossless", {"texts": ["junk"]}),
    ("lossy", {"exact_group": bytes(32)}), ("text", {"id_planes": [b"junk"]}), ("text", {"version_spans": [0, 1]}),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "fields"), FIELDS_OF_ANOTHER_CODEC, ids=str)
async def test_fields_of_another_codec_are_refused_and_charged_to_the_serving_peer(codec, fields):
    valid = pack_text_group(make_text_group(ME)) if codec == "text" else pack_group(make_group(ME), codec=codec)
    assert unpack_any(valid)
    body = valid + pb.Body(**fields).SerializeToString()
    envelope = Envelope(id=b"", body=body, signature=ME.sign(ENVELOPE_DOMAIN, body))
    verdict = await validate(envelope.to_bytes(), _context(manifest=MANIFEST))
    assert reason_of(verdict) == "malformed"
    blamed = attribute_refusal("malformed", origin="relay", sender=verdict.sender, signed=verdict.signed)
    assert blamed == ("relay", Behaviour.REFUSED)


@pytest.mark.parametrize(
    ("bound", "within", "beyond"),
    [
        (many_whole(1, 9, least=1, most=3), [[1], [9, 1, 5]], [[], [0], [5, 10], [9, 9, 9, 9]]),
        (many_whole(0, 9, most=2), [[], [0, 9]], [[10], [1, 1, 1]]),
        (many(JUDGED, least=1, most=2), [[math.nan], [math.inf, -1.0]], [[], [0.0, 0.0, 0.0]]),
        (BODIES[pb.CODEC_EXACT]["finishes"], [[1, 2, 3]], [[], [0], [4, 1]]),
    ],
)
def test_bounds_of_lists(bound, within, beyond):
    assert all(map(bound, within))
    assert not any(map(bound, beyond))


def test_the_first_field_beyond_its_bound_is_named():
    fields = {"schema": 1, "first_number": 2, "last_number": 2**63, "since_ms": MAX_TIME_MS + 1}
    assert first_beyond(pb.Question(**fields), TABLES[pb.Question]) == "last_number"
    assert first_beyond(pb.Question(**fields | {"last_number": 3}), TABLES[pb.Question]) == "since_ms"
    assert first_beyond(pb.Question(schema=1, first_number=2), TABLES[pb.Question]) is None
