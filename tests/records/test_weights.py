"""Weight offers and requests: signatures, bounds, reasons of refusals; groups that name the peer of their weights."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import pack_group, unpack_group
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import (
    WeightsOffer,
    WeightsPart,
    WeightsRequest,
    open_offer,
    open_weights_request,
    seal_offer,
)
from tests.conftest import RUN_ID, TOKENIZER, make_group
from tests.records.test_codec import refuses
from tests.records.wire_example import hash_chunks, sign_weights_info

OTHER = Identity.from_seed(bytes(reversed(range(32))))


def make_offer(identity: Identity, **changes: Any) -> WeightsOffer:
    offer = WeightsOffer(
        run_id=RUN_ID,
        peer_id=identity.peer_id,
        version=7,
        created_at=1000.5,
        model="tiny-s",
        tokenizer=TOKENIZER,
        started_from="12" * 16,
        num_bytes=2500,
        sha256=bytes(32),
        chunk_bytes=1000,
        chunks_sha256=bytes(32),
        probe_ids=(1, 2, 3),
        probe_logprobs=(-1.5, -0.25),
    )
    return replace(offer, **changes)


def test_an_offer_is_small_and_read_unchanged(identity):
    offer = make_offer(identity, adapter_config=b"{}", num_bytes=15 << 30, chunk_bytes=1 << 20)
    data = seal_offer(offer, identity)
    assert open_offer(data) == offer
    assert len(data) < 400


def test_an_offer_holds_an_adapter_that_names_each_layer_of_the_largest_models(identity):
    layers = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(126) for name in "abcdefg"]
    offer = make_offer(identity, adapter_config=json.dumps({"target_modules": layers}).encode())
    assert open_offer(seal_offer(offer, identity)) == offer


def test_the_last_chunk_has_the_remaining_bytes(identity):
    offer = make_offer(identity)
    assert [offer.size_of(chunk) for chunk in range(offer.num_chunks)] == [1000, 1000, 500]
    assert make_offer(identity, num_bytes=2000).num_chunks == 2


def test_a_list_of_hashes_must_match_the_offer(identity):
    hashes = hash_chunks([b"a", b"b", b"c"])
    offer = make_offer(identity, chunks_sha256=hashlib.sha256(hashes).digest())
    assert offer.lists(hashes)
    assert not offer.lists(hashes[:-1])
    assert not replace(offer, num_bytes=3500).lists(hashes)
    assert not offer.lists(hash_chunks([b"a", b"b", b"d"]))


def test_an_offer_signed_with_another_key_is_refused(identity):
    with refuses("signature"):
        open_offer(seal_offer(make_offer(identity), OTHER))


def test_a_signature_of_another_domain_is_refused(identity):
    message = pb.WeightsOffer.FromString(seal_offer(make_offer(identity), identity))
    message.signature = identity.sign(b"ftis-node/peer/1\n", message.body)
    with refuses("signature"):
        open_offer(message.SerializeToString())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 2}, "version"), ({"run": b"x"}, "malformed"), ({"version": 0}, "malformed"),
        ({"version": 2**63}, "malformed"), ({"sha256": bytes(31)}, "malformed"), ({"chunk_bytes": 0}, "malformed"),
        ({"chunk_bytes": (1 << 20) + 1}, "malformed"), ({"num_bytes": 0}, "malformed"),
        ({"num_bytes": 2**62}, "malformed"), ({"probe_ids": [1, 2]}, "malformed"),
        ({"probe_ids": range(300), "probe_logprobs": [-1.0] * 299}, "malformed"),
        ({"probe_logprobs": [-1.0, float("nan")]}, "malformed"),
        ({"probe_logprobs": [-1.0, float("-inf")]}, "malformed"), ({"probe_logprobs": [-1.0, 0.5]}, "malformed"),
        ({"adapter_config": bytes(80_000)}, "malformed"), ({"adapter_config": bytes(100_000)}, "size"),
        ({"model": "m" * 129}, "malformed"),
    ],
)  # fmt: skip
def test_a_signed_offer_out_of_bounds_is_refused(identity, changes, reason):
    info = pb.WeightsInfo.FromString(pb.WeightsOffer.FromString(seal_offer(make_offer(identity), identity)).body)
    for name, value in changes.items():
        info.ClearField(name)  # type: ignore[arg-type]
        info.MergeFrom(pb.WeightsInfo(**{name: value}))
    with refuses(reason):
        open_offer(sign_weights_info(info.SerializeToString(), identity))


@pytest.mark.parametrize(
    "weights_request",
    [
        WeightsRequest(WeightsPart.OFFER), WeightsRequest(WeightsPart.HASHES, file=bytes(32)),
        WeightsRequest(WeightsPart.CHUNKS, file=bytes(32), first=9, count=64),
    ],
)  # fmt: skip
def test_requests_are_read_unchanged(weights_request):
    assert open_weights_request(weights_request.to_bytes()) == weights_request


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"",
        pb.WeightsQuestion(schema=1).SerializeToString(),
        pb.WeightsQuestion(schema=1, part=9).SerializeToString(),  # type: ignore[arg-type]
        WeightsRequest(WeightsPart.HASHES, file=b"../../identity.key").to_bytes(),
        WeightsRequest(WeightsPart.CHUNKS, file=bytes(32), count=65).to_bytes(),
        WeightsRequest(WeightsPart.CHUNKS, file=bytes(32)).to_bytes(),
    ],
)
def test_invalid_requests_are_refused(data):
    with pytest.raises(RecordError):
        open_weights_request(data)


def test_a_group_names_the_peer_of_its_weights_and_takes_no_byte_without_one(identity):
    own = make_group(identity)
    followed = replace(own, weights_of=OTHER.peer_id)
    assert unpack_group(pack_group(followed)).weights_of == OTHER.peer_id
    assert unpack_group(pack_group(own)).weights_of is None
    assert len(pack_group(followed)) - len(pack_group(own)) == 38 + 3
    body = pb.Body.FromString(pack_group(own))
    body.weights_of = b"no peer id"
    with refuses("malformed"):
        unpack_group(body.SerializeToString())
