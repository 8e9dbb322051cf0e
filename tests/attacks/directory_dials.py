"""A port that counts the dials of the victim, and that the directory lists beside addresses that cannot be dialed."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.attacks.member import Member
from tests.attacks.messages import INVALID_ADDRESSES
from tests.attacks.victim import Victim

NUM_EACH = 3
LISTED_FOR_S = 300.0


class CountingPort:
    """A port of the loopback. `num_dials` counts the connections of the victim; other members dial it too."""

    def __init__(self, victim: Victim) -> None:
        self.port = 0
        self.num_dials = 0
        self._victim = victim

    async def register(self, member: Member) -> int:
        """Register invented members, each with an invalid address and this port; return how many are stored."""
        valid = f"/ip4/127.0.0.1/tcp/{self.port}"
        return await member.register([(invalid, valid) for invalid in INVALID_ADDRESSES * NUM_EACH], ttl_s=LISTED_FOR_S)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_dials += self._is_of_victim(writer.get_extra_info("peername")[1])
        writer.transport.abort()

    def _is_of_victim(self, port: int) -> bool:
        """Return whether a process of the victim owns the connection with this local port."""
        opened = itertools.chain(*(process.net_connections("tcp") for process in self._victim.node.processes()))
        return any(connection.laddr.port == port for connection in opened if connection.laddr)


@asynccontextmanager
async def counting_port(victim: Victim) -> AsyncIterator[CountingPort]:
    port = CountingPort(victim)
    async with await asyncio.start_server(port.accept, "127.0.0.1", 0) as server:
        port.port = server.sockets[0].getsockname()[1]
        yield port
