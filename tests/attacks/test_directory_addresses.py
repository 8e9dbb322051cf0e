"""Addresses in the directory that one parser accepts and another rejects: the node skips them and dials the others.

A node looks for members once a minute, so one test registers all invalid addresses.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.gossip.wire_format import bucket_key
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import bucket_of
from tests.attacks.victim import wait_until_continued

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

INVALID_ADDRESSES = (
    "/dns4/a_b/tcp/4001",  # Compose makes such names
    "/ip6/fe80::1%eth0/tcp/4001",
    "/ip6/fe80::1%/tcp/4001",
    "/dns4/a..b/tcp/4001",
    "/dns4/a-.b/tcp/4001",
    "/dns4/" + "a" * 200 + "/tcp/4001",
    "/ip4/127.0.0.1/tcp/00000000000000004001",
    "/ip4/127.0.0.1/udp/4001",
    "/ip4/127.0.0.1/tcp/4001/p2p-circuit",
    "/ip4/127.0.0.1/tcp/4001/ws/ws/quic-v1",
)
NUM_EACH = 3
DIALED_WITHIN_S = 100.0


@asynccontextmanager
async def counting_port(victim: Victim) -> AsyncIterator[tuple[int, list[float]]]:
    """Yield a port of the loopback, and the times when the victim connected to it; other members dial it too."""
    seen: list[float] = []

    def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_of(victim, writer.get_extra_info("peername")[1]):
            seen.append(time.monotonic())
        writer.transport.abort()

    server = await asyncio.start_server(note, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


def is_of(victim: Victim, port: int) -> bool:
    """Return whether a process of the victim owns the connection with this local port."""
    opened = itertools.chain(*(process.net_connections("tcp") for process in victim.node.processes()))
    return any(connection.laddr.port == port for connection in opened if connection.laddr)


async def register(member: Member, port: int) -> int:
    """Store entries of invented members, each with an invalid address and one at `port`; return how many are stored."""
    run_id, expires_at = member.maker.manifest.run_id, time.time() + 120
    entries = []
    for invalid in INVALID_ADDRESSES * NUM_EACH:
        one = Identity.generate()
        addresses = [f"{transport}/p2p/{one.peer_id}" for transport in (invalid, f"/ip4/127.0.0.1/tcp/{port}")]
        payload = pack_member(addresses, num_shards=1)
        entries.append((one, sign_entry(one, EntryKind.MEMBER, run_id, payload, expires_at=expires_at)))
    stored = await member.link.directory._node.store_many(
        [bucket_key(run_id, bucket_of(one.peer_id)) for one, _ in entries],
        [entry for _, entry in entries],
        expires_at,
        subkeys=[one.peer_id for one, _ in entries],
    )
    return sum(map(bool, stored.values()))


async def test_addresses_that_cannot_be_dialed_are_skipped(victim: Victim, attacker: Member, honest: Member) -> None:
    async with counting_port(victim) as (port, seen):
        assert await register(attacker, port) > 0

        async def is_dialed() -> bool:
            return bool(seen)

        await victim.until(is_dialed, within_s=DIALED_WITHIN_S)
        await asyncio.sleep(2.0)  # time for the other dials
    await wait_until_continued(victim, honest)
