"""Programs of other networks that come by: a crawler, a host with other protocols, a hivemind DHT client."""

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
FIND_NODE = b"\x24\x08\x04\x12\x20"  # Kademlia's FIND_NODE, its length in front; the key of 32 bytes follows
OTHERS = ("/echo/1.0.0", "/chat/1.0.0", "/eth2/beacon_chain/req/status/1/ssz_snappy", "/ftis/0/nosuch/fetch")
NUM_TALKS = 8
NUM_ROUNDS = 3
CLIENT_S = 120.0  # of a busy machine


class Crawler(Visitor):
    """Connects, identifies, asks the protocols of IPFS, leaves; several times."""

    name = "IPFS-like crawler"

    async def visit(self, target: Target, folder: Path) -> int:
        async with host(folder) as crawler:
            for _ in range(NUM_ROUNDS):
                await crawler.connect(target)
                query = FIND_NODE + os.urandom(32)
                await asyncio.gather(*(crawler.say(target, name, query) for name in CRAWLED))
                await crawler.disconnect(target)
        return NUM_ROUNDS * (1 + len(CRAWLED))


class PlainHost(Visitor):
    """A go-libp2p host with an application of its own: it offers that to the target, in vain."""

    name = "go-libp2p host with other protocols"

    async def visit(self, target: Target, folder: Path) -> int:
        async with host(folder) as stranger:
            await stranger.control.handle_streams(OTHERS, folder / "own.sock")
            await stranger.connect(target)
            async with stranger.control.subscribe("chat"):
                for number in range(NUM_TALKS):
                    await stranger.say(target, OTHERS[number % len(OTHERS)], os.urandom(1 + 100 * number))
                    await stranger.control.publish("chat", os.urandom(100))
        return 1 + 2 * NUM_TALKS


class HivemindClient(Visitor):
    """hivemind's own DHT in client mode, with the RSA identity that hivemind makes: it stores and reads records.

    In a process of its own, as `hivemind.DHT` has it: a `P2P` that goes while its event loop goes on warns.
    """

    name = "hivemind DHT client"

    async def visit(self, target: Target, folder: Path) -> int:
        await asyncio.to_thread(folder.mkdir)
        command = (sys.executable, "-m", "tests.attacks.visitors.hivemind_client", target.address, str(folder))
        return int(await output_of(self.name, *command, within_s=CLIENT_S))
