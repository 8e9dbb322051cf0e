"""Offers of weights -> rules -> the list of chunk hashes, the chunks -> a file; and the engine that refuses it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.config.node import NodeSettings
from ftis_node.errors import ModelError
from ftis_node.node.protocols import NullGeneration
from ftis_node.node.startup.wiring import Wiring
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.identity import WEIGHTS_DOMAIN
from ftis_node.records.weights import WeightsPart, open_weights_request, seal_offer
from ftis_node.swarm.peer_guard import Place
from ftis_node.validation.weights_rules import Follower
from tests.conftest import TOKENIZER
from tests.fuzz.chains.served import chunks_of, offer_of
from tests.fuzz.mutator import Item, join
from tests.fuzz.targets import _parsed
from tests.fuzz.world import HOSTILE, RUN, world
from tests.records.wire_example import hash_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from ftis_node.node.loops.weight_follow import FollowLoop

LEARNER = HOSTILE[0]
FILE = b"twelve bytes"
WHAT = 0x03  # 0: an offer, 1: hashes, 2: a chunk
AS_IS = 0x80  # the offer as it is, not signed here
UNMENDED = 0x40  # the offer's hashes are what it says, not those of the chunks that are given
FOLLOWER = Follower(LEARNER.peer_id, RUN.run_id, TOKENIZER, "ab" * 16, 1000, (1, 2, 3), takes_adapters=True)
SETTINGS = NodeSettings(model="none", role="generator", roles={"follow": LEARNER.peer_id})
AT_ONCE = SETTINGS.model_copy(update={"roles": SETTINGS.roles.model_copy(update={"poll_interval_s": 0.0})})
MAX_QUESTIONS = 40  # then the learner says that it has nothing: a node would ask for ever


class Engine(NullGeneration):
    """Serves nothing."""

    async def try_weights(self, *_: object) -> None:
        raise ModelError("differs from the learner by inf nats on the probe")


def kinds(tag: int) -> type | None:
    """What an item holds."""
    if tag & WHAT:
        return None
    return pb.WeightsOffer if tag & AS_IS else pb.WeightsInfo


async def chain(items: Sequence[Item]) -> None:
    """Looks, fetches and serves, once for each offer."""
    offers = [item for item in items if not item.tag & WHAT]
    hashes = [item.data for item in items if item.tag & WHAT == 1]
    chunks = [item.data for item in items if item.tag & WHAT > 1]
    async with world() as made:
        made.is_viewed = False
        context = replace(made.parts.context, settings=AT_ONCE)
        parts = replace(made.parts, context=context, generation=Engine(lambda: 0))
        loop = Wiring(parts).follow_loop
        loop._follower = FOLLOWER
        for item in offers:
            made.members[0].serve_weights(_learner(_offer(item, chunks), hashes or [hash_chunks(chunks)], chunks))
            with parts.gossip.guard.work_for(LEARNER.peer_id, Place.WEIGHTS):
                await _once(loop)


async def _once(loop: FollowLoop) -> None:
    offer, signed = await loop._poll()
    if offer is not None and loop._should_fetch(offer):
        await loop._fetch(offer, signed)
        if loop._newest is not None and loop._newest.version == offer.version:
            loop._held.for_engine(offer.version)
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
    info = _parsed(pb.WeightsInfo, item.data)
    info.peer = LEARNER.peer
    if not item.tag & UNMENDED:
        info.sha256 = hashlib.sha256(b"".join(chunks)).digest()
        info.chunks_sha256 = hashlib.sha256(hash_chunks(chunks)).digest()
    told = info.SerializeToString()
    return pb.WeightsOffer(body=told, signature=LEARNER.sign(WEIGHTS_DOMAIN, told)).SerializeToString()


def seeds() -> list[bytes]:
    """A file that comes whole, wrong chunks, an adapter."""
    offer = replace(offer_of(FILE), peer_id=LEARNER.peer_id)
    body = pb.WeightsOffer.FromString(seal_offer(offer, LEARNER)).body
    later = replace(offer, version=2, adapter_config=b"{}")
    body_later = pb.WeightsOffer.FromString(seal_offer(later, LEARNER)).body
    chunks = [Item(2, one) for one in chunks_of(FILE)]
    return [
        join([Item(0, body), *chunks]),
        join([Item(0, body), Item(0, body_later), *chunks]),
        join([Item(UNMENDED, body), Item(1, hash_chunks(chunks_of(FILE))), Item(2, b"wron"), *chunks[1:]]),
        join([Item(AS_IS, seal_offer(offer, LEARNER)), *chunks]),
    ]
