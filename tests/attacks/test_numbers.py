"""Numbers at the limits of their types: times, versions and rates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import Announcement
from ftis_node.records.identity import PEER_DOMAIN
from ftis_node.records.parsing import SCHEMA
from tests.attacks.member import UNUSED, joined
from tests.attacks.victim import wait_until_continued

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stubs.group_maker import GroupMaker
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

LARGEST = 2**64 - 1
PAGE = 256  # after so many answers a node asks for the next page, from the newest time on
RECORDS: dict[str, dict[str, Any]] = {
    "last number": {"last_number": LARGEST},
    "version": {"policy_version": LARGEST},
    "time": {"created_ms": LARGEST},
    "rate of NaN": {"tokens_per_s": float("nan")},
    "infinite rate": {"tokens_per_s": float("inf")},
    "role of 500 bytes": {"role": "r" * 500},
}


async def test_answers_with_the_largest_time_are_rejected(
    victim: Victim, maker: GroupMaker, sockets: Path, honest: Member
) -> None:
    """A node that accepts the time of a full page asks only for newer groups, which never exist."""

    def prepare(member: Member) -> None:
        page = [_announcement(member, at, created_ms=LARGEST) for at in range(PAGE)]
        member.answers = lambda: page

    async with joined(sockets / "late", maker, victim, prepare=prepare) as attacker:
        await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "announcement_malformed"))
    await wait_until_continued(victim, honest)


def _announcement(member: Member, at: int, *, created_ms: int) -> bytes:
    valid = Announcement(
        id=at.to_bytes(32, "big"),
        number=UNUSED + at,
        envelope_bytes=500,
        num_tokens=64,
        tokenizer=bytes.fromhex(member.maker.tokenizer.fingerprint)[:8],
        policy_version=1,
        created_at=time.time(),
    )
    message = pb.Announcement.FromString(valid.to_bytes())
    message.created_ms = created_ms
    return message.SerializeToString()


@pytest.mark.parametrize("changes", list(RECORDS.values()), ids=list(RECORDS))
async def test_a_directory_record_has_bounds(
    victim: Victim, attacker: Member, honest: Member, changes: dict[str, Any]
) -> None:
    record = _record(attacker, **changes)

    async def is_refused() -> bool:
        await attacker.gossip.publish_record(record, ttl_s=60)
        return bool(await victim.num_refused_of(attacker.peer_id, "record_malformed"))

    await victim.until(is_refused)


def _record(member: Member, **changes: Any) -> bytes:
    """Return a signed record of the run with changed fields."""
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
