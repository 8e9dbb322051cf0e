"""A member of a loopback swarm that answers as its script says, claims any address, and signs whatever it likes."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from ftis_node.errors import RecordError
from ftis_node.gossip import FetchOutcome, GossipLimits
from ftis_node.gossip.loopback import UNBOUNDED, LoopbackGossip
from ftis_node.gossip.wire_format import RpcService
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import open_envelope
from ftis_node.records.identity import ENVELOPE_DOMAIN, PEER_DOMAIN

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator

    from ftis_node.gossip.loopback import LoopbackSwarm
    from ftis_node.records.identity import Identity

LIMITS = GossipLimits(max_requests_per_minute=UNBOUNDED, max_upload_bytes_per_s=UNBOUNDED)
ADDRESSES = (
    *("/ip4/8.8.8.8/tcp/1", "/ip6/2606:4700::1/tcp/1", "/ip4/127.0.0.1/tcp/0", "/dns4/a_b/tcp/4001", "", "/", "/ip4"),
    *("/ip4/999.1.1.1/tcp/1", "/ip6/fe80::1%eth0/tcp/1", "/p2p-circuit", "\x00", "/ip4/8.8.8.8/tcp/1/p2p-circuit"),
)
MANNERS = ("right", "double", "other", "more", "garbage", "late", "nothing", "busy", "cut", "large", "never", "reverse")
LATE_S = (0.1, 3.0, 9.9, 12.0, 61.0)


class Hostile(LoopbackGossip):
    """`shelf` are envelopes by id; `manners` say for each service how a request is answered."""

    def __init__(self, swarm: LoopbackSwarm, identity: Identity, *, run_id: str, num_shards: int, rng: Any) -> None:
        super().__init__(swarm, peer_id=identity.peer_id, run_id=run_id, limits=LIMITS, num_shards=num_shards)
        self.identity = identity
        self.shelf: dict[bytes, bytes] = {}
        self.answers: list[bytes] = []
        self.manners: dict[RpcService, str] = dict.fromkeys(RpcService, "right")
        self.claimed: list[str] | None = None
        self._rng: random.Random = rng

    @property
    def addresses(self) -> list[str]:
        """What it claims."""
        return super().addresses if self.claimed is None else self.claimed

    async def serve_stream(
        self, peer_id: str, service: RpcService, request: bytes
    ) -> AsyncGenerator[bytes | FetchOutcome, None]:
        """Items in the manner of the service."""
        manner = self.manners[service]
        if manner == "never":
            await asyncio.sleep(1e6)
        if manner == "late":
            await asyncio.sleep(self._rng.choice(LATE_S))
        if manner == "busy":
            yield FetchOutcome.BUSY
            return
        for item in self._given(manner, service, request):
            yield item
        yield FetchOutcome.BROKEN if manner == "cut" else FetchOutcome.COMPLETE

    def _given(self, manner: str, service: RpcService, request: bytes) -> list[bytes]:
        right = self._right(service, request)
        others = (
            list(self.shelf.values())[-3:] if service in (RpcService.FETCH, RpcService.FETCH_TEXT) else self.answers
        )
        return {
            "double": right * 2,
            "other": others[:2],
            "more": right + others,
            "garbage": [self._rng.randbytes(self._rng.choice((0, 1, 64, 300))) for _ in range(3)],
            "nothing": [],
            "large": [bytes(LIMITS.max_body_bytes + 1)],
            "reverse": right[::-1],
        }.get(manner, right)

    def _right(self, service: RpcService, request: bytes) -> list[bytes]:
        if service in (RpcService.FETCH, RpcService.FETCH_TEXT):
            ids = [request[at : at + 32] for at in range(0, len(request), 32)]
            return [self.shelf[one] for one in ids if one in self.shelf]
        return list(self.answers) if service is RpcService.ASK else [b""]

    def sign_body(self, body: bytes) -> bytes:
        """Puts any body under the own signature on the shelf; returns its id."""
        return self.put(pb.Envelope(body=body, signature=self.identity.sign(ENVELOPE_DOMAIN, body)).SerializeToString())

    def put(self, envelope: bytes) -> bytes:
        """Puts an envelope on the shelf, also somebody else's; returns its id, as far as it has one."""
        try:
            group_id = open_envelope(envelope).id
        except RecordError:
            group_id = hashlib.sha256(envelope).digest()
        self.shelf[group_id] = envelope
        while len(self.shelf) > 64:
            del self.shelf[next(iter(self.shelf))]
        return group_id

    def publish_info(self, info: pb.PeerInfo) -> bytes:
        """A signed directory record that says anything of itself."""
        info.peer = self.identity.peer
        told = info.SerializeToString()
        return pb.PeerRecord(body=told, signature=self.identity.sign(PEER_DOMAIN, told)).SerializeToString()
