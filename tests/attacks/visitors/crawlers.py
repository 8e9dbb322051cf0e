"""Programs of other networks: a crawler, a host with other protocols, and a hivemind DHT client."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from tests.attacks.visitors.host import Visitor, host, output_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.attacks.visitors.host import Target

CRAWLED = (
    "/ipfs/id/1.0.0", "/ipfs/kad/1.0.0", "/ipfs/lan/kad/1.0.0", "/ipfs/ping/1.0.0", "/ipfs/bitswap/1.2.0",
    "/libp2p/autonat/1.0.0", "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/dcutr",
)  # fmt: skip
FIND_NODE = b"\x24\x08\x04\x12\x20"  # Kademlia's FIND_NODE with its length; a key of 32 bytes follows
OTHERS = ("/echo/1.0.0", "/chat/1.0.0", "/eth2/beacon_chain/req/status/1/ssz_snappy", "/ftis/0/nosuch/fetch")
NUM_REQUESTS = 8
NUM_ROUNDS = 3
CLIENT_S = 120.0  # on a busy machine


class Crawler(Visitor):
    """A crawler that several times connects, identifies, queries the protocols of IPFS and disconnects."""

    name = "IPFS-like crawler"

    async def visit(self, target: Target, folder: Path) -> int:
        async with host(folder) as crawler:
            for _ in range(NUM_ROUNDS):
                await crawler.connect(target)
                query = FIND_NODE + os.urandom(32)
                await asyncio.gather(*(crawler.request(target, name, query) for name in CRAWLED))
                await crawler.disconnect(target)
        return NUM_ROUNDS * (1 + len(CRAWLED))


class PlainHost(Visitor):
    """A go-libp2p host of another application, whose protocols the target does not know."""

    name = "go-libp2p host with other protocols"

    async def visit(self, target: Target, folder: Path) -> int:
        async with host(folder) as visitor:
            await visitor.control.handle_streams(OTHERS, folder / "app.sock")
            await visitor.connect(target)
            async with visitor.control.subscribe("chat"):
                for number in range(NUM_REQUESTS):
                    await visitor.request(target, OTHERS[number % len(OTHERS)], os.urandom(1 + 100 * number))
                    await visitor.control.publish("chat", os.urandom(100))
        return 1 + 2 * NUM_REQUESTS


class HivemindClient(Visitor):
    """A client of hivemind's DHT with hivemind's RSA identity: it stores and reads records.

    It runs in a separate process, because a `P2P` that is deleted before its event loop closes prints warnings.
    """

    name = "hivemind DHT client"

    async def visit(self, target: Target, folder: Path) -> int:
        await asyncio.to_thread(folder.mkdir)
        command = (sys.executable, "-m", "tests.attacks.visitors.hivemind_client", target.address, str(folder))
        return int(await output_of(self.name, *command, within_s=CLIENT_S))
