"""A hostile member of a loopback swarm: it answers wrongly, claims any address, and signs any body."""

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator
from typing import Any

from ftis_node.errors import RecordError
from ftis_node.gossip import FetchOutcome, GossipLimits
from ftis_node.gossip.loopback import UNBOUNDED, LoopbackGossip, LoopbackSwarm
from ftis_node.gossip.wire_format import RpcService
from ftis_node.records.codec import unpack_any
from ftis_node.records.envelope import open_envelope
from ftis_node.records.identity import Identity
from tests.fuzz.fuzzed_node import sign_body

LIMITS = GossipLimits(max_requests_per_minute=UNBOUNDED, max_upload_bytes_per_s=UNBOUNDED)
ADDRESSES = (
    *("/ip4/8.8.8.8/tcp/1", "/ip6/2606:4700::1/tcp/1", "/ip4/127.0.0.1/tcp/0", "/dns4/a_b/tcp/4001", "", "/", "/ip4"),
    *("/ip4/999.1.1.1/tcp/1", "/ip6/fe80::1%eth0/tcp/1", "/p2p-circuit", "\x00", "/ip4/8.8.8.8/tcp/1/p2p-circuit"),
)
BEHAVIORS = (
    *("correct", "repeated", "other", "additional", "random", "late"),
    *("empty", "busy", "broken", "large", "never", "reversed"),
)
BODIES = (RpcService.FETCH, RpcService.FETCH_TEXT)
LATE_S = (0.1, 3.0, 9.9, 12.0, 61.0)
MAX_ENVELOPES = 64


class Hostile(LoopbackGossip):
    """A member with `envelopes` by id; `behaviors` maps each service to the way in which it answers requests."""

    def __init__(self, swarm: LoopbackSwarm, identity: Identity, *, run_id: str, num_shards: int, rng: Any) -> None:
        super().__init__(swarm, peer_id=identity.peer_id, run_id=run_id, limits=LIMITS, num_shards=num_shards)
        self.identity = identity
        self.envelopes: dict[bytes, bytes] = {}
        self.answers: list[bytes] = []
        self.behaviors: dict[RpcService, str] = dict.fromkeys(RpcService, "correct")
        self.claimed: list[str] | None = None  # addresses
        self._rng: random.Random = rng

    @property
    def addresses(self) -> list[str]:
        return super().addresses if self.claimed is None else self.claimed

    async def serve_stream(
        self, peer_id: str, service: RpcService, request: bytes
    ) -> AsyncGenerator[bytes | FetchOutcome, None]:
        """Yield the items of an answer by the behavior of the service."""
        behavior = self.behaviors[service]
        if behavior == "never":
            await asyncio.sleep(1e6)
        if behavior == "late":
            await asyncio.sleep(self._rng.choice(LATE_S))
        if behavior == "busy":
            yield FetchOutcome.BUSY
            return
        for item in self._items(behavior, service, request):
            yield item
        yield FetchOutcome.BROKEN if behavior == "broken" else FetchOutcome.COMPLETE

    def _items(self, behavior: str, service: RpcService, request: bytes) -> list[bytes]:
        if service in BODIES:
            ids = [request[at : at + 32] for at in range(0, len(request), 32)]
            correct = [self.envelopes[one] for one in ids if one in self.envelopes]
            others = list(self.envelopes.values())[-3:]
        else:
            correct, others = list(self.answers) if service is RpcService.ASK else [b""], self.answers
        return {
            "repeated": correct * 2,
            "other": others[:2],
            "additional": correct + others,
            "random": [self._rng.randbytes(self._rng.choice((0, 1, 64, 300))) for _ in range(3)],
            "empty": [],
            "large": [bytes(LIMITS.max_body_bytes + 1)],
            "reversed": correct[::-1],
        }.get(behavior, correct)

    def sign_body(self, body: bytes) -> bytes:
        """Sign and store any body; return its id."""
        return self.put(sign_body(body, self.identity))

    def put(self, envelope: bytes) -> bytes:
        """Store an envelope of any sender; return its id, or a hash if it is malformed."""
        try:
            group_id = open_envelope(envelope).id
        except RecordError:
            group_id = hashlib.sha256(envelope).digest()
        self.envelopes[group_id] = envelope
        while len(self.envelopes) > MAX_ENVELOPES:
            del self.envelopes[next(iter(self.envelopes))]
        return group_id

    def number_of(self, group_id: bytes) -> int:
        """Return the number of a stored group, 1 if it is malformed."""
        try:
            return max(1, unpack_any(open_envelope(self.envelopes[group_id]).body).number)
        except RecordError:
            return 1
