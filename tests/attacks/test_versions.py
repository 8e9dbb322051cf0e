"""Members with another wire version: refused by name, without penalty, and reported to the operator."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from ftis_node.cli.app import run
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.identity import PEER_DOMAIN
from ftis_node.records.parsing import SCHEMA
from tests.attacks.member import Member, sign_body
from tests.attacks.victim import Victim
from tests.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NEWER, OLDER = SCHEMA + 1, SCHEMA - 1


def stamped(message: pb.Announcement | pb.Body, data: bytes, schema: int) -> bytes:
    message.ParseFromString(data)
    message.schema = schema
    return message.SerializeToString()


def record_of(member: Member, schema: int) -> bytes:
    body = pb.PeerInfo(schema=schema, peer=member.identity.peer, name="other").SerializeToString()
    return pb.PeerRecord(body=body, signature=member.identity.sign(PEER_DOMAIN, body)).SerializeToString()


async def announce_as(member: Member, victim: Victim, schema: int) -> None:
    """Announce until the victim shows this version in the member's row."""
    claim = stamped(pb.Announcement(), member.claim(bytes(32), b"x"), schema)

    async def is_shown() -> bool:
        await member.gossip.announce(claim)
        return (await victim.row(member.peer_id)).get("wire_schema") == schema

    await victim.until(is_shown)


async def test_an_older_peer_is_refused_by_name_until_it_is_updated(victim, attacker, capsys):
    await announce_as(attacker, victim, OLDER)
    capsys.readouterr()
    assert await asyncio.to_thread(run, ["peers", "--home", str(victim.node.home)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(attacker.peer_id)]
    assert line.endswith(f"speaks wire {OLDER}, older than this node's {SCHEMA}: its operator must update ftis-node")
    assert "announcement_version" in line

    group = attacker.envelope(attacker.group())
    other = sign_body(stamped(pb.Body(), group.body, OLDER), attacker.identity)
    before = await victim.num_refused("version")
    await attacker.offer(other)  # the announcement has this version, the body the older one
    await victim.until_above(before, lambda: victim.num_refused("version"))
    row = await victim.row(attacker.peer_id)
    assert (row["trust_level"], row["ban_reason"]) == ("good", "")
    assert not {"announcement_version", "refused", "false_claim"} & row["reasons"].keys()

    await attacker.offer(attacker.group())
    await victim.until_above(0, lambda: victim.num_accepted(attacker.peer_id))
    assert (await victim.row(attacker.peer_id))["wire_words"] == ""


async def test_a_node_reports_that_most_members_are_newer(victim, honest, scene):
    async with AsyncExitStack() as stack:
        newer = [await stack.enter_async_context(scene.member()) for _ in range(2)]
        await announce_as(newer[0], victim, NEWER)

        async def has_read_the_record():
            await newer[1].gossip.publish_record(record_of(newer[1], NEWER), ttl_s=60)
            return (await victim.row(newer[1].peer_id)).get("wire_schema") == NEWER

        await victim.until(has_read_the_record)

        advice = f"2 of 3 members speak wire {NEWER}, this node {SCHEMA}: update ftis-node"

        async def is_behind():
            swarm = (await victim.status())["swarm"]
            return (swarm["update"], swarm["peers_newer"], swarm["peers_older"]) == (advice, 2, 0)

        await victim.until(is_behind)
        await eventually(lambda: advice in victim.node.log.read_text())  # by the next look at the members
        await victim.until_continued()
