"""Malformed messages that are no groups: announcements, questions, frames, streams, directory entries and records."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ftis_node.gossip.directory.entries import EntryKind, sign_entry
from ftis_node.gossip.wire_format import HEADER, Frame, RpcService, record_key
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.identity import PEER_DOMAIN
from ftis_node.records.parsing import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.attacks.member import Member

    Script = Callable[[RpcService, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

FOUR_GIB = 2**32 - 1
LARGEST = 2**64 - 1
PAGE = 256  # after so many answers a node asks for the next page, from the newest time on
YEARS_S = 30 * 365 * 86400.0
VARINT_4_GIB = b"\x0a\xff\xff\xff\xff\x0f"  # field 1, a length of 4 GiB
ANNOUNCEMENTS = {  # with the reason of their refusal
    "random bytes": (b"\xffrandom", "announcement_parse"),
    "a varint of 4 GiB": (b"\x12\xff\xff\xff\xff\x0f", "announcement_parse"),
    "too long": (bytes(600), "announcement_size"),
}
QUESTIONS = {"random bytes": b"\xff\xffrandom", "a varint of 4 GiB": VARINT_4_GIB}
FRAMES = {  # by the reason of their refusal
    "frame_kind": b"\xff" + os.urandom(4096),
    "frame_size": HEADER.pack(Frame.REQUEST, FOUR_GIB),
    "ids": HEADER.pack(Frame.REQUEST, 5) + b"short",
}
RECORDS: dict[str, dict[str, Any]] = {
    "last number": {"last_number": LARGEST},
    "version": {"policy_version": LARGEST},
    "time": {"created_ms": LARGEST},
    "rate of NaN": {"tokens_per_s": float("nan")},
    "infinite rate": {"tokens_per_s": float("inf")},
    "role of 500 bytes": {"role": "r" * 500},
}
INVALID_ADDRESSES = (  # one parser accepts them and another refuses them
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


def record(member: Member, **changes: Any) -> bytes:
    """Return a signed directory record of the run with changed fields."""
    body = pb.PeerInfo(
        schema=SCHEMA,
        run=bytes.fromhex(member.maker.manifest.run_id),
        peer=member.identity.peer,
        name="attacker",
        tokenizer=bytes.fromhex(member.maker.tokenizer.fingerprint),
        role="full",
        created_ms=round(time.time() * 1000),
    )
    for name, value in changes.items():
        setattr(body, name, value)
    data = body.SerializeToString()
    return pb.PeerRecord(body=data, signature=member.identity.sign(PEER_DOMAIN, data)).SerializeToString()


def invalid_entries(member: Member, other_id: str) -> dict[str, tuple[Any, bytes, float]]:
    """Return key, value and expiry of directory entries that no node may store."""
    run_id, soon, late = member.maker.manifest.run_id, time.time() + 300, time.time() + YEARS_S
    own, others = record_key(run_id, member.peer_id), record_key(run_id, other_id)

    def entry(expires_at: float) -> bytes:
        return sign_entry(member.identity, EntryKind.RECORD, run_id, b"x", expires_at=expires_at)

    return {
        "3 MiB": (own, bytes(3 << 20), soon),
        "for thirty years": (own, entry(late), late),
        "under another's key": (others, entry(soon), soon),
        "random bytes": (own, os.urandom(500), soon),
    }


def answer_with_the_largest_time(member: Member) -> None:
    """Answer questions with a full page. A node that accepts its time asks only for later groups, which never exist."""
    page = []
    for at in range(PAGE):
        message = pb.Announcement.FromString(member.announcement(at.to_bytes(32, "big")))
        message.created_ms = LARGEST
        page.append(message.SerializeToString())
    member.answers = lambda: page


async def _huge_frame(service: RpcService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEADER.pack(Frame.ITEM, FOUR_GIB) + bytes(1000))
    await reader.read()


async def _random_frames(service: RpcService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\xff" + np.random.default_rng(0).bytes(4096))
    await reader.read()


async def _too_many(service: RpcService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(HEADER.pack(Frame.ITEM, 1) + b"x")
        await writer.drain()


async def _a_byte_a_second(service: RpcService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEADER.pack(Frame.ITEM, 60_000))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(1.0)


SERVERS: dict[str, tuple[Script, str]] = {  # answers to the requests of a node, with the outcome of its fetch
    "a frame of 4 GiB": (_huge_frame, "too_large"),
    "random bytes": (_random_frames, "broken"),
    "items without end": (_too_many, "too_large"),
    "a byte a second": (_a_byte_a_second, "timed_out"),
}
