"""Hosts whose key is not Ed25519: they connect and stay, ask for the run's services, and write announcements."""

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

STAY_S = 2.5  # a node looks at its peers each second
MESH_S = 0.5  # gossipsub drops what is published before its mesh has grown
NUM_ANNOUNCEMENTS = 6


class ForeignKeyHost(Visitor):
    """Connects, asks for each service of the run, and stays for a while."""

    def __init__(self, kind: KeyKind) -> None:
        self.name, self._kind = f"{kind} host", kind

    async def visit(self, target: Target, folder: Path) -> int:
        async with host(folder, self._kind) as visitor:
            await visitor.connect(target)
            request = HEADER.pack(Frame.REQUEST, 32) + bytes(32)
            for service in RpcService:
                await visitor.say(target, protocol(target.run_id, service), request)
            await asyncio.sleep(STAY_S)
        return 1 + len(RpcService)


class ForeignAuthor(Visitor):
    """Writes announcements in good form. They come straight to the target, or by a meeting point between them."""

    def __init__(self, *, by_meeting_point: bool = False) -> None:
        self._by_meeting_point = by_meeting_point
        self.name = "rsa author" + (" by a meeting point" if by_meeting_point else "")

    async def visit(self, target: Target, folder: Path) -> int:
        await asyncio.to_thread(folder.mkdir)
        name = topic(target.run_id, 0)
        async with host(folder / "a", KeyKind.RSA) as author:
            if not self._by_meeting_point:
                await author.connect(target)
                return await _publish(author, name, target)
            async with host(folder / "m") as meeting_point, meeting_point.control.subscribe(name):
                await meeting_point.connect(target)
                at_meeting_point = f"{meeting_point.addresses[0]}/p2p/{meeting_point.peer_id}"
                await author.connect(replace(target, address=at_meeting_point))
                return await _publish(author, name, target)


async def _publish(author: Host, name: str, target: Target) -> int:
    """Says that it has groups that nobody else has, of the run's own tokenizer: the target would ask for them."""
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
