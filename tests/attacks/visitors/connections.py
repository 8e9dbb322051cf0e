"""Peers that use up connections and streams: a thousand streams, a silent peer, and repeated connections."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.wire_format import HEADER, Frame, RpcService, protocol
from tests.attacks.visitors.host import DIAL_S, Visitor, host

if TYPE_CHECKING:
    from pathlib import Path

    from tests.attacks.visitors.host import Host, Target

AT_ONCE = 50
NUM_STREAMS = 1000
HOLD_S = 3.0


class ManyStreams(Visitor):
    """A peer that opens streams of the run's services and sends half a request on each."""

    name = f"{NUM_STREAMS} streams"

    async def visit(self, target: Target, folder: Path) -> int:
        limit, num_opened = asyncio.Semaphore(AT_ONCE), 0
        async with host(folder) as visitor, AsyncExitStack() as held:
            await visitor.connect(target)

            async def hold(number: int) -> None:
                nonlocal num_opened
                name = protocol(target.run_id, list(RpcService)[number % len(RpcService)])
                async with limit:
                    stream = visitor.control.stream(target.peer_id, name, timeout_s=DIAL_S)
                    try:
                        _, writer = await held.enter_async_context(stream)
                    except (OSError, EOFError, P2pdError):
                        return  # a limit of libp2p
                writer.write(HEADER.pack(Frame.REQUEST, 64) + bytes(10))
                num_opened += 1

            await asyncio.gather(*map(hold, range(NUM_STREAMS)))
            await asyncio.sleep(HOLD_S)
        return num_opened


class SilentPeer(Visitor):
    """A peer that opens one stream of each service and sends nothing."""

    name = "silent peer"

    async def visit(self, target: Target, folder: Path) -> int:
        num_opened = 0
        async with host(folder) as visitor, AsyncExitStack() as held:
            await visitor.connect(target)
            for service in RpcService:
                name = protocol(target.run_id, service)
                with suppress(OSError, EOFError, P2pdError):  # a refused stream is no error of the visitor
                    await held.enter_async_context(visitor.control.stream(target.peer_id, name, timeout_s=DIAL_S))
                    num_opened += 1
            await asyncio.sleep(HOLD_S)
        return 1 + num_opened


class ReconnectingPeer(Visitor):
    """A peer that connects and disconnects repeatedly, as fast as it can."""

    def __init__(self, *, num_times: int = 200) -> None:
        self.name, self._num_times = f"{num_times} connections and disconnections", num_times

    async def visit(self, target: Target, folder: Path) -> int:
        async with host(folder) as visitor:
            return sum([await self._once(visitor, target) for _ in range(self._num_times)])

    @staticmethod
    async def _once(visitor: Host, target: Target) -> int:
        try:
            await visitor.connect(target)
        except P2pdError:  # p2pd of the visitor waits after a failed dial
            await asyncio.sleep(1.0)
            return 0
        await visitor.disconnect(target)
        return 1
