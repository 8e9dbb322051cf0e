"""Malformed messages that are no groups: announcements, questions, directory records, and answers to requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ftis_node.gossip.frames import HEADER, Frame
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.identity import PEER_DOMAIN
from ftis_node.records.parsing import SCHEMA

if TYPE_CHECKING:
    from tests.attacks.member import Member

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

FOUR_GIB = 2**32 - 1
LARGEST = 2**64 - 1
PAGE = 256  # after so many answers a node asks for the next page, from the newest time on
ANNOUNCEMENTS = {  # with the reason of their refusal
    "random bytes": (b"\xffrandom", "announcement_parse"),
    "a varint of 4 GiB": (b"\x12\xff\xff\xff\xff\x0f", "announcement_parse"),
    "too long": (bytes(600), "announcement_size"),
}
QUESTIONS = {"random bytes": b"\xff\xffrandom", "a varint of 4 GiB": b"\x0a\xff\xff\xff\xff\x0f"}
RECORDS: dict[str, dict[str, Any]] = {
    "last number": {"last_number": LARGEST}, "version": {"policy_version": LARGEST}, "time": {"created_ms": LARGEST},
    "rate of NaN": {"tokens_per_s": float("nan")}, "infinite rate": {"tokens_per_s": float("inf")},
    "role of 500 bytes": {"role": "r" * 500},
}  # fmt: skip


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


def answer_with_the_largest_time(member: Member) -> None:
    """Answer questions with a full page. A node that accepts its time asks only for later groups, which never exist."""
    page = []
    for at in range(PAGE):
        message = pb.Announcement.FromString(member.announcement(at.to_bytes(32, "big")))
        message.created_ms = LARGEST
        page.append(message.SerializeToString())
    member.answers = lambda: page


async def _huge_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEADER.pack(Frame.ITEM, FOUR_GIB) + bytes(1000))
    await reader.read()


async def _random_frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\xff" + np.random.default_rng(0).bytes(4096))
    await reader.read()


async def _too_many(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(HEADER.pack(Frame.ITEM, 1) + b"x")
        await writer.drain()


async def _a_byte_a_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
