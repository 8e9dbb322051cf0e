"""The serving end of streams by itself: what is open when it closes, and what comes at that moment."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from ftis_node.gossip.base import GossipCounters, GossipLimits
from ftis_node.gossip.reception import Reception
from ftis_node.gossip.secret import OpenSeal
from ftis_node.gossip.streams import StreamServer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_stream_that_comes_while_the_server_closes_is_cut(tmp_path: Path, num_turns: int) -> None:
    """After so many turns of the event loop: not accepted yet, being accepted, served."""
    limits = GossipLimits()
    server = StreamServer(
        {}, peer_id="us", limits=limits, counters=GossipCounters(), reception=Reception(limits), seal=OpenSeal()
    )
    await server.listen(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(tmp_path / "s"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await server.close()
        for _ in range(8):
            await asyncio.sleep(0)
        caller.setblocking(False)
        with suppress(ConnectionResetError):  # as one that nobody accepted
            assert caller.recv(1) == b"", "cut"
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "gossip-serve"]
