"""Malicious bodies: random bytes, zip bombs, bodies larger than announced, and streams without end."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zstandard

from ftis_node.gossip.wire_format import HEADER, Frame
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import pack_group
from tests.attacks.member import joined, padded_envelope, sign_body
from tests.attacks.victim import MAX_ENVELOPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.stubs.group_maker import GroupMaker
    from ftis_node.gossip.wire_format import RpcService
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

BOMB_BYTES = 512 << 20
FOUR_GIB = 2**32 - 1
CHARGED_FOR_S, ANNOUNCED_EVERY_S = 12.0, 0.5
NUM_BODIES = 12  # more than a ban needs, in any order of arrival
BODIES = {
    "random bytes": lambda: os.urandom(2000),
    "a varint of 4 GiB": lambda: b"\x0a\xff\xff\xff\xff\x0f" + bytes(100),
    "no bytes": lambda: b"",
}


@pytest.mark.parametrize("make", list(BODIES.values()), ids=list(BODIES))
async def test_a_malformed_body_is_rejected_and_its_relay_banned(
    victim: Victim, attacker: Member, make: Callable[[], bytes]
) -> None:
    claims = {one: attacker.claim(one, make()) for one in (os.urandom(32) for _ in range(NUM_BODIES))}
    await attacker.announce_until_requested(claims)
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "parse"))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))


def _bomb(claimed_bytes: int) -> Callable[[pb.Body], None]:
    """Return a change that adds a plane of a few kB that expands to `claimed_bytes`."""
    packer = zstandard.ZstdCompressor(level=19)
    frame = packer.compress(bytes(claimed_bytes))

    def change(body: pb.Body) -> None:
        del body.id_planes[:]
        body.id_planes.append(frame)

    return change


def _lengths(value: int) -> Callable[[pb.Body], None]:
    def change(body: pb.Body) -> None:
        body.lengths[1] = value

    return change


BOMBS = {
    "a plane of half a gigabyte": (_bomb, BOMB_BYTES, "malformed"),
    "lengths of four billion": (_lengths, FOUR_GIB, "size"),
}


@pytest.mark.parametrize(("make", "value", "reason"), list(BOMBS.values()), ids=list(BOMBS))
async def test_a_zip_bomb_is_not_unpacked(
    victim: Victim, attacker: Member, make: Callable[[int], Callable[[pb.Body], None]], value: int, reason: str
) -> None:
    change, resident = make(value), victim.resident_bytes()
    envelopes = []
    for _ in range(NUM_BODIES):
        body = pb.Body.FromString(pack_group(attacker.group(), codec="lossless"))
        change(body)
        envelopes.append(sign_body(body.SerializeToString(), attacker.identity))
    assert max(len(one.body) for one in envelopes) < MAX_ENVELOPE_BYTES
    await attacker.offer(*envelopes)
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, reason))
    assert victim.resident_bytes() - resident < 50 << 20
    await victim.until(lambda: victim.is_banned(attacker.peer_id))


async def test_a_codec_that_the_run_does_not_allow_is_rejected(victim: Victim, attacker: Member) -> None:
    group = attacker.group()
    await attacker.offer(sign_body(pack_group(group, codec="lossy"), attacker.identity))
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "codec"))


FOREIGN_FIELDS: dict[str, dict[str, object]] = {
    "texts": {"texts": ["a", "b", "c", "d"]},
    "means of log-probs": {"mean_logprobs": [-1.0] * 4},
    "the id of an exact form": {"retells": bytes(32)},
    "planes of ids": {"id_planes": [b"x"]},
    "planes of log-probs": {"logprob_planes": [b"x"]},
}


@pytest.mark.parametrize("fields", list(FOREIGN_FIELDS.values()), ids=list(FOREIGN_FIELDS))
async def test_fields_of_another_codec_are_rejected(
    victim: Victim, attacker: Member, fields: dict[str, object]
) -> None:
    """A stricter reader would ban the honest peer that relays such a body."""
    body = pb.Body.FromString(pack_group(attacker.group()))
    body.MergeFrom(pb.Body(**fields))
    await attacker.offer(sign_body(body.SerializeToString(), attacker.identity))
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "malformed"))
    assert (await victim.row(attacker.peer_id))["groups_accepted"] == 0


async def test_one_body_that_does_not_parse_is_charged_once(victim: Victim, attacker: Member) -> None:
    """A new honest peer with a bug keeps announcing one malformed group."""
    group_id = os.urandom(32)
    claim = attacker.claim(group_id, os.urandom(500))
    await attacker.announce_until_requested({group_id: claim})
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "parse"))
    for _ in range(round(CHARGED_FOR_S / ANNOUNCED_EVERY_S)):
        await attacker.gossip.announce(claim)
        await asyncio.sleep(ANNOUNCED_EVERY_S)
    assert await victim.num_refused_of(attacker.peer_id, "parse") == 1
    assert not await victim.is_banned(attacker.peer_id)


async def test_a_body_above_the_runs_bound_is_not_read_to_its_end(victim: Victim, attacker: Member) -> None:
    """The announced size is too small. A body with its true, large size is not requested."""
    before = await victim.num_errors("fetch_errors", "too_large")
    group_id, large_id = os.urandom(32), os.urandom(32)
    large = bytes(2 << 20)
    claims = {group_id: attacker.claim(group_id, large, envelope_bytes=100)}
    await attacker.gossip.announce(attacker.claim(large_id, large))
    await attacker.announce_until_requested(claims)

    async def is_counted() -> bool:
        return await victim.num_errors("fetch_errors", "too_large") > before

    await victim.until(is_counted)
    assert large_id not in attacker.requested_ids
    assert (await victim.row(attacker.peer_id))["failed_pulls"] >= 1


async def test_padded_groups_within_the_bound_are_admitted(victim: Victim, attacker: Member) -> None:
    await attacker.offer(*(padded_envelope(attacker.group(), attacker.identity) for _ in range(40)))

    async def are_admitted() -> bool:
        return bool((await victim.row(attacker.peer_id))["groups_accepted"] >= 40)

    await victim.until(are_admitted)


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


SERVERS = {
    "a frame of 4 GiB": (_huge_frame, "too_large"),
    "random bytes": (_random_frames, "broken"),
    "items without end": (_too_many, "too_large"),
    "a byte a second": (_a_byte_a_second, "timed_out"),
}


@pytest.mark.parametrize(("script", "outcome"), list(SERVERS.values()), ids=list(SERVERS))
async def test_an_invalid_stream_ends_while_others_are_pulled(
    victim: Victim, maker: GroupMaker, sockets: Path, honest: Member, script: Callable[..., object], outcome: str
) -> None:
    before = await victim.num_errors("fetch_errors", outcome)
    accepted = (await victim.row(honest.peer_id))["groups_accepted"]
    folder = sockets / os.urandom(3).hex()
    async with joined(folder, maker, victim, script=script) as attacker:
        attacker.number = 1

        async def is_counted() -> bool:
            for _ in range(8):  # more than the node has slots for pulls
                one = os.urandom(32)
                await attacker.gossip.announce(attacker.claim(one, b"", envelope_bytes=200))
            return await victim.num_errors("fetch_errors", outcome) > before

        started_at = asyncio.get_running_loop().time()
        await victim.until(is_counted, within_s=40)
        took_s = asyncio.get_running_loop().time() - started_at
        await victim.until(lambda: _failed(victim, attacker))
    gained = (await victim.row(honest.peer_id))["groups_accepted"] - accepted
    assert gained >= took_s / 4, "the honest peer sends two groups a second"


async def _failed(victim: Victim, attacker: Member) -> bool:
    row = await victim.row(attacker.peer_id)
    return bool(row["failed_pulls"] and any(reason.startswith("pull_") for reason in row["reasons"]))
