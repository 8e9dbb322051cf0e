"""Requests to each service -> bodies, texts, weights, answers and confirmations of this node."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from ftis_node.gossip import FetchOutcome
from ftis_node.gossip.names import RpcService
from ftis_node.node.loops.weight_offer import OfferedVersion
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import Accepted, open_announcement, seal_group
from ftis_node.records.peer_messages import BackfillRequest, WeightsOffer, WeightsPart, WeightsRequest, seal_offer
from tests.conftest import TOKENIZER, make_group
from tests.fuzz.fuzzed_node import HOSTILE, MADE_AT, OWN, RUN, FuzzedNode, fuzzed_node
from tests.fuzz.mutator import Item, join
from tests.records.wire_example import hash_chunks

SERVICES = tuple(RpcService)
REFUSALS = {"ids", "size", "parse", "version", "malformed", "busy", "streams", "requests", "refused"}
CHUNK_BYTES = 4
FILE = b"ten bytes."
GROUPS = tuple(make_group(OWN, run_id=RUN.run_id, number=number, created_at=MADE_AT - number) for number in (1, 2, 3))
ENVELOPES = tuple(seal_group(group, OWN) for group in GROUPS)


def kinds(tag: int) -> type | None:
    return {RpcService.ASK: pb.Question, RpcService.WEIGHTS: pb.WeightsQuestion}.get(_service(tag))


def _service(tag: int) -> RpcService:
    return SERVICES[(tag & 7) % len(SERVICES)]


async def chain(items: Sequence[Item]) -> None:
    """Serve each request to its end."""
    async with fuzzed_node() as fuzzed:
        fuzzed.renders_all_views = False
        _fill(fuzzed)
        for item in items:
            peer_id = HOSTILE[(item.tag >> 3 & 3) % len(HOSTILE)].peer_id
            items_out = [one async for one in fuzzed.gossip.serve_stream(peer_id, _service(item.tag), item.data)]
            assert isinstance(items_out[-1], FetchOutcome)
            if _service(item.tag) is RpcService.ASK:
                for answer in items_out[:-1]:
                    assert isinstance(answer, bytes)
                    open_announcement(answer)
        assert set(fuzzed.gossip.counters.serve_errors) <= REFUSALS, fuzzed.gossip.counters.serve_errors


def _fill(fuzzed: FuzzedNode) -> None:
    accepted = [
        (Accepted(envelope, envelope.to_bytes(), group, (5, 6, 7)), True)
        for envelope, group in zip(ENVELOPES, GROUPS, strict=True)
    ]
    fuzzed.parts.store.buffer.admit_many(accepted)
    path = fuzzed.home.root / "weights.bin"
    path.write_bytes(FILE)
    loop = fuzzed.wiring.offer_loop
    offered = offer_of(FILE)
    loop._newest = OfferedVersion(offered, seal_offer(offered, OWN), path, hash_chunks(chunks_of(FILE)))
    loop._held[1], loop._requested_at[1] = loop._newest, 0.0
    fuzzed.gossip.serve_weights(loop.give)


def chunks_of(file: bytes) -> list[bytes]:
    return [file[at : at + CHUNK_BYTES] for at in range(0, len(file), CHUNK_BYTES)]


def offer_of(file: bytes) -> WeightsOffer:
    hashes = hash_chunks(chunks_of(file))
    return WeightsOffer(
        run_id=RUN.run_id, peer_id=OWN.peer_id, version=1, created_at=MADE_AT, model="m", tokenizer=TOKENIZER,
        started_from="ab" * 16, num_bytes=len(file), sha256=hashlib.sha256(file).digest(), chunk_bytes=CHUNK_BYTES,
        chunks_sha256=hashlib.sha256(hashes).digest(), probe_ids=(1, 2, 3), probe_logprobs=(-1.0, -2.0),
    )  # fmt: skip


def seeds() -> list[bytes]:
    ids = b"".join(envelope.id for envelope in ENVELOPES)
    questions = [
        BackfillRequest(),
        BackfillRequest(sender=OWN.peer_id, first_number=1, last_number=3),
        BackfillRequest(since=1e9),
    ]
    file = hashlib.sha256(FILE).digest()
    parts = [
        WeightsRequest(WeightsPart.OFFER),
        WeightsRequest(WeightsPart.HASHES, file=file),
        WeightsRequest(WeightsPart.CHUNKS, file=file, first=0, count=3),
        WeightsRequest(WeightsPart.CHUNKS, file=file, first=2, count=64),
    ]
    tag = SERVICES.index
    by_id = [Item(tag(service), ids) for service in (RpcService.FETCH, RpcService.FETCH_TEXT, RpcService.CONFIRM)]
    return [
        join([Item(tag(RpcService.HELLO), b""), *by_id]),
        join([by_id[0], *(one._replace(tag=one.tag | 8) for one in by_id[1:])]),
        join([Item(tag(RpcService.ASK), replace(question).to_bytes()) for question in questions]),
        join([Item(tag(RpcService.WEIGHTS), part.to_bytes()) for part in parts]),
    ]
