"""Helpers for network tests: wait for a condition, announce until received, serve bodies."""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ftis_node.backoff import ExponentialBackoff
from ftis_node.gossip import NetworkSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ftis_node.gossip import Gossip, GossipMessage

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def settings(folder: Path, **changes: Any) -> NetworkSettings:
    """A quick node on this machine alone. Its folder is made by the node itself."""
    values: dict[str, Any] = {
        "sockets_dir": folder,
        "listen": (LOOPBACK,),
        "use_nat_helpers": False,
        "heartbeat_s": 0.1,
        "poll_s": 0.1,
        "retry": ExponentialBackoff(first_s=0.5, ceiling_s=2.0),
    }
    return NetworkSettings(**values | changes)


async def hear(node: Gossip, payload: bytes, *, within_s: float = 10.0) -> GossipMessage:
    """The announcement with this payload; others before it are passed over."""
    async with asyncio.timeout(within_s), aclosing(node.announcements()) as announcements:
        async for announcement in announcements:
            if announcement.payload == payload:
                return announcement
    raise AssertionError("the announcements ended")


async def announce_until_heard(sender: Gossip, receivers: Sequence[Gossip], payload: bytes) -> list[GossipMessage]:
    """Announces until every receiver heard it: gossipsub loses what is sent before its mesh has grown."""
    hearing = asyncio.gather(*(hear(receiver, payload, within_s=30) for receiver in receivers))
    while not hearing.done():
        await sender.announce(payload)
        await asyncio.wait({hearing}, timeout=0.3)
    return await hearing


class Shelf:
    """Bodies by their hash; hands them out as `serve` wants it."""

    def __init__(self, *bodies: bytes) -> None:
        self.bodies = {hashlib.sha256(body).digest(): body for body in bodies}

    @property
    def ids(self) -> list[bytes]:
        return list(self.bodies)

    async def lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        return [self.bodies[one] for one in ids if one in self.bodies]


def process_is_gone(pid: int) -> bool:
    """Whether no process runs under `pid` (one that ended but was not waited for counts as gone)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def files_under(folder: Path) -> list[Path]:
    """All that lies in a folder but folders: files, sockets, links."""
    return [path for path in folder.rglob("*") if not path.is_dir()]


def random_id() -> bytes:
    return os.urandom(32)
