"""Hosts whose key is not Ed25519: they connect, request the run's services, and publish announcements."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.gossip.wire_format import HEADER, Frame, RpcService, protocol, topic
from ftis_node.records.envelope import Announcement
from tests.attacks.visitors.host import Host, KeyKind, Visitor, host

if TYPE_CHECKING:
    from pathlib import Path

    from tests.attacks.visitors.host import Target

STAY_S = 2.5  # a node checks its peers each second
MESH_S = 0.5  # gossipsub drops messages until its mesh is complete
NUM_ANNOUNCEMENTS = 6


class ForeignKeyHost(Visitor):
    """A host that requests each service of the run and stays connected for a while."""

    def __init__(self, kind: KeyKind) -> None:
        self.name, self._kind = f"{kind} host", kind

    async def visit(self, target: Target, folder: Path) -> int:
        async with host(folder, self._kind) as visitor:
            await visitor.connect(target)
            request = HEADER.pack(Frame.REQUEST, 32) + bytes(32)
            for service in RpcService:
                await visitor.request(target, protocol(target.run_id, service), request)
            await asyncio.sleep(STAY_S)
        return 1 + len(RpcService)


class ForeignAuthor(Visitor):
    """A host that publishes valid announcements, either directly to the target or through a forwarding host."""

    def __init__(self, *, is_forwarded: bool = False) -> None:
        self._is_forwarded = is_forwarded
        self.name = "rsa author" + (" through a forwarder" if is_forwarded else "")

    async def visit(self, target: Target, folder: Path) -> int:
        await asyncio.to_thread(folder.mkdir)
        name = topic(target.run_id, 0)
        async with host(folder / "a", KeyKind.RSA) as author:
            if not self._is_forwarded:
                await author.connect(target)
                return await _publish(author, name, target)
            async with host(folder / "m") as forwarder, forwarder.control.subscribe(name):
                await forwarder.connect(target)
                forwarder_address = f"{forwarder.addresses[0]}/p2p/{forwarder.peer_id}"
                await author.connect(replace(target, address=forwarder_address))
                return await _publish(author, name, target)


async def _publish(author: Host, name: str, target: Target) -> int:
    """Announce groups of the run's tokenizer that no other peer has, so a node would request them."""
    async with author.control.subscribe(name):
        await asyncio.sleep(MESH_S)
        for number in range(1, NUM_ANNOUNCEMENTS + 1):
            announcement = Announcement(
                id=os.urandom(32),
                number=number,
                envelope_bytes=500,
                num_tokens=64,
                tokenizer=bytes.fromhex(target.tokenizer)[:8],
                policy_version=1,
                created_at=time.time(),
            )
            await author.control.publish(name, announcement.to_bytes())
            await asyncio.sleep(MESH_S)
    return NUM_ANNOUNCEMENTS
