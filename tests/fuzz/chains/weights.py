"""Offers of weights -> rules -> chunk hashes, chunks -> a file; and an engine that refuses it."""

import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

from ftis_node.config.node import NodeSettings
from ftis_node.errors import ModelError
from ftis_node.node.loops import weight_follow
from ftis_node.node.loops.weight_follow import FollowLoop
from ftis_node.node.wiring import Wiring
from ftis_node.node.worker_interfaces import NullGeneration
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.peer_messages import WeightsPart, open_weights_request, seal_offer
from ftis_node.swarm.peer_guard import Place
from ftis_node.validation.weights_rules import Follower
from tests.conftest import TOKENIZER
from tests.fuzz.chains.serving import chunks_of, offer_of
from tests.fuzz.fuzzed_node import HOSTILE, RUN, fuzzed_node
from tests.fuzz.mutator import Item, join, parsed
from tests.records.wire_example import hash_chunks, sign_weights_info

LEARNER = HOSTILE[0]
FILE = b"twelve bytes"
TYPE_BITS = 0x03  # 0: an offer, 1: hashes, 2: a chunk
AS_IS = 0x80  # a raw offer instead of one to sign
INVALID_FIELDS = 0x40  # keeps the offer's hashes instead of setting those of the chunks
FOLLOWER = Follower(LEARNER.peer_id, RUN.run_id, TOKENIZER, "ab" * 16, 1000, (1, 2, 3), takes_adapters=True)
SETTINGS = NodeSettings(model="none", role="generator", roles={"follow": LEARNER.peer_id})
MAX_QUESTIONS = 40  # then the learner returns nothing, because a node would ask without end


class Engine(NullGeneration):
    """An engine that refuses all weights."""

    async def try_weights(self, *_: object) -> None:
        raise ModelError("differs from the learner by inf nats on the probe")


def kinds(tag: int) -> type | None:
    if tag & TYPE_BITS:
        return None
    return pb.WeightsOffer if tag & AS_IS else pb.WeightsInfo


async def chain(items: Sequence[Item]) -> None:
    """Poll, fetch and serve once for each offer."""
    offers = [item for item in items if not item.tag & TYPE_BITS]
    hashes = [item.data for item in items if item.tag & TYPE_BITS == 1]
    chunks = [item.data for item in items if item.tag & TYPE_BITS > 1]
    async with fuzzed_node() as fuzzed:
        fuzzed.renders_all_views = False
        context = replace(fuzzed.parts.context, settings=SETTINGS)
        parts = replace(fuzzed.parts, context=context, generation=Engine(lambda: 0))
        loop = Wiring(parts).follow_loop
        loop._follower = FOLLOWER
        for item in offers:
            fuzzed.members[0].serve_weights(_learner(_offer(item, chunks), hashes or [hash_chunks(chunks)], chunks))
            at_once = patch.object(weight_follow, "POLL_INTERVAL_S", 0.0)
            with at_once, parts.gossip.guard.work_for(LEARNER.peer_id, Place.WEIGHTS):
                await _once(loop)


async def _once(loop: FollowLoop) -> None:
    offer, signed = await loop._poll()
    if offer is not None and loop._should_fetch(offer):
        await loop._fetch(offer, signed)
        if loop._newest is not None and loop._newest.version == offer.version:
            loop._held.for_engine(offer)
            await loop._serve_guarded(offer.version, before=0)
        loop._held.find()


def _learner(
    offer: bytes, hashes: Sequence[bytes], chunks: Sequence[bytes]
) -> Callable[[str, bytes], AsyncGenerator[bytes, None]]:
    num_requests = 0

    async def give(peer_id: str, data: bytes) -> AsyncGenerator[bytes, None]:
        nonlocal num_requests
        num_requests += 1
        question = open_weights_request(data)
        if question.part is WeightsPart.OFFER:
            yield offer
        elif num_requests < MAX_QUESTIONS:
            for one in hashes if question.part is WeightsPart.HASHES else chunks[question.first :]:
                yield one

    return give


def _offer(item: Item, chunks: Sequence[bytes]) -> bytes:
    if item.tag & AS_IS:
        return item.data
    info = parsed(pb.WeightsInfo, item.data)
    info.peer = LEARNER.peer
    if not item.tag & INVALID_FIELDS:
        info.sha256 = hashlib.sha256(b"".join(chunks)).digest()
        info.chunks_sha256 = hashlib.sha256(hash_chunks(chunks)).digest()
    return sign_weights_info(info.SerializeToString(), LEARNER)


def seeds() -> list[bytes]:
    offer = replace(offer_of(FILE), peer_id=LEARNER.peer_id)
    body = pb.WeightsOffer.FromString(seal_offer(offer, LEARNER)).body
    later = replace(offer, version=2, adapter_config=b"{}")
    body_later = pb.WeightsOffer.FromString(seal_offer(later, LEARNER)).body
    chunks = [Item(2, one) for one in chunks_of(FILE)]
    return [
        join([Item(0, body), *chunks]),
        join([Item(0, body), Item(0, body_later), *chunks]),
        join([Item(INVALID_FIELDS, body), Item(1, hash_chunks(chunks_of(FILE))), Item(2, b"wron"), *chunks[1:]]),
        join([Item(AS_IS, seal_offer(offer, LEARNER)), *chunks]),
    ]
