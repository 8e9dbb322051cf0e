"""Helpers of network tests: settings, receiving and announcing, bodies to serve."""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ftis_node.backoff import ExponentialBackoff
from ftis_node.gossip import Gossip, GossipMessage, NetworkSettings

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PEER = "12D3KooWFLAyEDfpb3cDnXBP7JfUnuKAgz7tPeRwEUSmSunbS8dP"
RELAY = "12D3KooWGRUfLhVGzT4EzGEPx1yKPS2SsiAc6Lup4FvPuQxVmAUV"


def settings(folder: Path, **changes: Any) -> NetworkSettings:
    """Return settings of a node with short intervals on loopback. The node itself creates its folder."""
    values: dict[str, Any] = {
        "sockets_dir": folder, "listen": (LOOPBACK,), "use_nat_helpers": False, "heartbeat_s": 0.1, "poll_s": 0.1,
        "retry": ExponentialBackoff(first_s=0.5, ceiling_s=2.0),
    }  # fmt: skip
    return NetworkSettings(**values | changes)


async def receive(node: Gossip, payload: bytes, *, within_s: float = 10.0) -> GossipMessage:
    """Return the announcement with this payload, and skip others before it."""
    async with asyncio.timeout(within_s), aclosing(node.announcements()) as announcements:
        async for announcement in announcements:
            if announcement.payload == payload:
                return announcement
    raise AssertionError("the announcements ended")


async def announce_until_received(sender: Gossip, receivers: Sequence[Gossip], payload: bytes) -> list[GossipMessage]:
    """Announce until every receiver has the announcement: gossipsub loses messages before its mesh is complete."""
    receiving = asyncio.gather(*(receive(receiver, payload, within_s=30) for receiver in receivers))
    while not receiving.done():
        await sender.announce(payload)
        await asyncio.wait({receiving}, timeout=0.3)
    return await receiving


class BodyStore:
    """Bodies by their hash, with a `lookup` for `Gossip.serve`."""

    def __init__(self, *bodies: bytes) -> None:
        self.bodies = {hashlib.sha256(body).digest(): body for body in bodies}

    @property
    def ids(self) -> list[bytes]:
        return list(self.bodies)

    async def lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        return [self.bodies[one] for one in ids if one in self.bodies]


def process_is_gone(pid: int) -> bool:
    """Return whether no process runs with this `pid`. A zombie counts as gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def random_id() -> bytes:
    return os.urandom(32)
