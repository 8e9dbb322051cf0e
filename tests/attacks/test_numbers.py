"""Numbers that no honest peer has: times, versions and rates at the ends of their types."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.envelope import Announcement
from ftis_node.records.identity import PEER_DOMAIN
from ftis_node.records.parsing import SCHEMA
from tests.attacks.member import UNUSED, joined
from tests.attacks.victim import goes_on

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stubs.group_maker import GroupMaker
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

LARGEST = 2**64 - 1
PAGE = 256  # answers after which a node asks for the next ones, from the newest time on
RECORDS: dict[str, dict[str, Any]] = {
    "last number": {"last_number": LARGEST},
    "version": {"policy_version": LARGEST},
    "time": {"created_ms": LARGEST},
    "rate of NaN": {"tokens_per_s": float("nan")},
    "endless rate": {"tokens_per_s": float("inf")},
    "role of 500 bytes": {"role": "r" * 500},
}


async def test_answers_from_the_end_of_time_are_refused(
    victim: Victim, maker: GroupMaker, sockets: Path, honest: Member
) -> None:
    """A page of announcements: a node that believes their time asks for what is newer than that."""

    def prepare(member: Member) -> None:
        page = [_announcement(member, at, created_ms=LARGEST) for at in range(PAGE)]
        member.answers = lambda: page

    async with joined(sockets / "late", maker, victim, prepare=prepare) as attacker:
        await victim.until(lambda: victim.blames(attacker.peer_id, "announcement_malformed"))
    await goes_on(victim, honest)


def _announcement(member: Member, at: int, *, created_ms: int) -> bytes:
    good = Announcement(
        id=at.to_bytes(32, "big"),
        number=UNUSED + at,
        envelope_bytes=500,
        num_tokens=64,
        tokenizer=bytes.fromhex(member.maker.tokenizer.fingerprint)[:8],
        policy_version=1,
        created_at=time.time(),
    )
    message = pb.Announcement.FromString(good.to_bytes())
    message.created_ms = created_ms
    return message.SerializeToString()


@pytest.mark.parametrize("changes", list(RECORDS.values()), ids=list(RECORDS))
async def test_a_directory_record_has_bounds(
    victim: Victim, attacker: Member, honest: Member, changes: dict[str, Any]
) -> None:
    record = _record(attacker, **changes)

    async def is_refused() -> bool:
        await attacker.gossip.publish_record(record, ttl_s=60)
        return bool(await victim.blames(attacker.peer_id, "record_malformed"))

    await victim.until(is_refused)
    assert await victim.row(attacker.peer_id) != {}, "and its line can be written"


def _record(member: Member, **changes: Any) -> bytes:
    """A well signed record of the run, with one field changed."""
    body = pb.PeerInfo(
        schema=SCHEMA,
        run=bytes.fromhex(member.maker.manifest.run_id),
        peer=member.identity.peer,
        name="endless",
        tokenizer=bytes.fromhex(member.maker.tokenizer.fingerprint),
        role="full",
        created_ms=round(time.time() * 1000),
    )
    for name, value in changes.items():
        setattr(body, name, value)
    data = body.SerializeToString()
    return pb.PeerRecord(body=data, signature=member.identity.sign(PEER_DOMAIN, data)).SerializeToString()
