"""All visits of hosts that are no members. Each visits once, in a new folder, and returns its actions.

A refusal by the target is no error. An error means that the visitor itself failed.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from ftis_node.gossip.frames import HEADER, Frame
from ftis_node.gossip.names import RpcService, protocol
from ftis_node.gossip.p2pd.client import P2pdError
from tests.attacks.member import GONE
from tests.attacks.visitors.host import DIAL_S, FOREIGN, KeyKind, Target, host, output_of

Visit = Callable[[Target, Path], Awaitable[int]]

CRAWLED = (
    "/ipfs/id/1.0.0", "/ipfs/kad/1.0.0", "/ipfs/lan/kad/1.0.0", "/ipfs/ping/1.0.0", "/ipfs/bitswap/1.2.0",
    "/libp2p/autonat/1.0.0", "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/dcutr",
)  # fmt: skip
FIND_NODE = b"\x24\x08\x04\x12\x20"  # Kademlia's FIND_NODE with its length; a key of 32 bytes follows
OTHERS = ("/echo/1.0.0", "/chat/1.0.0", "/eth2/beacon_chain/req/status/1/ssz_snappy", "/ftis/0/nosuch/fetch")
NUM_CRAWLS, NUM_REQUESTS, NUM_CONNECTIONS = 3, 8, 100
NUM_STREAMS, NUM_AT_ONCE = 1000, 50
HOLD_S = 2.5  # a node checks its peers each second
CLIENT_S = 120.0  # on a busy machine
JS = Path(__file__).with_name("js")


def js_missing() -> str:
    """Return what the js-libp2p host lacks here and how to get it, or "" if nothing."""
    if shutil.which("node") is None:
        return "the js-libp2p host needs Node.js 20 or later, and PATH has no `node`"
    return "" if (JS / "node_modules").is_dir() else f"the js-libp2p host needs its packages: run `npm ci` in {JS}"


async def use_a_foreign_key(kind: KeyKind, target: Target, folder: Path) -> int:
    """Request each service of the run, with a key that is not Ed25519, and stay connected for a while."""
    async with host(folder, kind) as visitor:
        await visitor.connect(target)
        request = HEADER.pack(Frame.REQUEST, 32) + bytes(32)
        for service in RpcService:
            await visitor.request(target, protocol(target.run_id, service), request)
        await asyncio.sleep(HOLD_S)
    return 1 + len(RpcService)


async def crawl(target: Target, folder: Path) -> int:
    """Several times connect, identify, query the protocols of IPFS and disconnect."""
    async with host(folder) as crawler:
        for _ in range(NUM_CRAWLS):
            await crawler.connect(target)
            query = FIND_NODE + os.urandom(32)
            await asyncio.gather(*(crawler.request(target, name, query) for name in CRAWLED))
            await crawler.disconnect(target)
    return NUM_CRAWLS * (1 + len(CRAWLED))


async def use_other_protocols(target: Target, folder: Path) -> int:
    """Request protocols and publish in a topic that the target does not know, as a host of another application."""
    async with host(folder) as visitor:
        await visitor.control.handle_streams(OTHERS, folder / "app.sock")
        await visitor.connect(target)
        async with visitor.control.subscribe("chat"):
            for number in range(NUM_REQUESTS):
                await visitor.request(target, OTHERS[number % len(OTHERS)], os.urandom(1 + 100 * number))
                await visitor.control.publish("chat", os.urandom(100))
    return 1 + 2 * NUM_REQUESTS


async def use_hivemind(target: Target, folder: Path) -> int:
    """Store and read records with hivemind's DHT and its RSA identity.

    It runs in a separate process, because a `P2P` that is deleted before its event loop closes prints warnings.
    """
    await asyncio.to_thread(folder.mkdir)
    command = (sys.executable, "-m", "tests.attacks.visitors.hivemind_client", target.address, str(folder))
    return int(await output_of("hivemind DHT client", *command, within_s=CLIENT_S))


async def use_js(target: Target, folder: Path) -> int:
    """Identify, ping, and request own protocols, those of IPFS and those of the run, with js-libp2p."""
    names = [protocol(target.run_id, service) for service in RpcService]
    command = ("node", str(JS / "visit.mjs"), target.address, *names)
    return 4 + len(json.loads(await output_of("js-libp2p host", *command, within_s=CLIENT_S))["supported"])


async def hold_streams(target: Target, folder: Path, *, count: int, data: bytes) -> int:
    """Open streams of the run's services and send only `data` on each."""
    limit, num_opened = asyncio.Semaphore(NUM_AT_ONCE), 0
    async with host(folder) as visitor, AsyncExitStack() as held:
        await visitor.connect(target)

        async def hold(number: int) -> None:
            nonlocal num_opened
            name = protocol(target.run_id, list(RpcService)[number % len(RpcService)])
            async with limit:
                with suppress(*GONE):  # a limit of libp2p
                    stream = visitor.control.stream(target.peer_id, name, timeout_s=DIAL_S)
                    _, writer = await held.enter_async_context(stream)
                    writer.write(data)
                    num_opened += 1

        await asyncio.gather(*map(hold, range(count)))
        await asyncio.sleep(HOLD_S)
    return num_opened


async def reconnect(target: Target, folder: Path) -> int:
    """Connect and disconnect repeatedly, as fast as possible."""
    num_connected = 0
    async with host(folder) as visitor:
        for _ in range(NUM_CONNECTIONS):
            try:
                await visitor.connect(target)
            except P2pdError:  # p2pd of the visitor waits after a failed dial
                await asyncio.sleep(1.0)
            else:
                await visitor.disconnect(target)
                num_connected += 1
    return num_connected


VISITS: dict[str, Visit] = {
    **{f"{kind} host": partial(use_a_foreign_key, kind) for kind in FOREIGN},
    "hivemind DHT client": use_hivemind,
    "IPFS-like crawler": crawl,
    "go-libp2p host with other protocols": use_other_protocols,
    f"{NUM_STREAMS} streams": partial(hold_streams, count=NUM_STREAMS, data=HEADER.pack(Frame.REQUEST, 64) + bytes(10)),
    "silent peer": partial(hold_streams, count=len(RpcService), data=b""),
    "repeated connections": reconnect,
    **({} if js_missing() else {"js-libp2p host": use_js}),
}
