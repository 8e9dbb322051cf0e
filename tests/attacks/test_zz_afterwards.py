"""The last attacks. After all attacks the victim trains, admits honest groups, and has not grown in memory or on disk.

This file runs last. Run alone, it tests a victim without attackers.
"""

import sqlite3
from contextlib import closing

import pytest

from ftis_node.records.identity import Identity
from tests.attacks.victim import MAX_DISK_BYTES, MAX_READY_GROUPS

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

NUM_IDENTITIES = 1000
MAX_GROWTH_BYTES = 50 << 20
SLACK_BYTES = 6 << 20  # SQLite's write-ahead log and unused parts of its pages
MAX_EVENT_BYTES = 8 << 20


async def test_a_thousand_identities_of_one_peer_share_one_quota(victim, scene, honest):
    """One peer announces and serves valid groups of a thousand senders, which use up the quota of all new peers."""
    invented = [Identity.generate() for _ in range(NUM_IDENTITIES)]
    invented_ids = {one.peer_id for one in invented}

    async def is_within_share():  # the buffer is pruned each second
        with closing(sqlite3.connect(f"file:{victim.node.home}/replay.sqlite?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT sender FROM groups WHERE state = 'ready' AND own = 0").fetchall()
        num_held = sum(sender in invented_ids for (sender,) in rows)
        return num_held <= MAX_READY_GROUPS // 2  # one of two senders has half of the places

    accepted = await victim.num_accepted(honest.peer_id)
    async with scene.member(prepare=lambda member: member.answer_with_groups_of(invented)) as attacker:
        await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "quota"), within_s=120)
        await victim.until(is_within_share)
        await victim.until_above(accepted + 4, lambda: victim.num_accepted(honest.peer_id))
    assert not await victim.is_banned(honest.peer_id)


async def test_the_victim_trains_and_admits_honest_groups(victim, honest):
    await victim.until_continued()
    await victim.until_continued()
    assert victim.node.process.poll() is None
    assert len(victim.node.events("start")) == 1, "the node was started again"
    assert (await victim.status())["learner"]["restarts"] == 0
    assert (await victim.row(honest.peer_id))["groups_refused"] == {}
    fetched = await honest.gossip.fetch(honest.victim_id, [bytes(32)])
    assert fetched.outcome == "complete", "the honest peer is not served"


async def test_its_memory_has_not_grown_and_its_disk_stays_under_its_cap(victim, honest):
    grown = victim.resident_bytes() - victim.resident_bytes_before
    assert grown < MAX_GROWTH_BYTES, f"{grown / 2**20:.0f} MiB more than before the attacks"

    assert victim.file_bytes("replay.sqlite*") < MAX_DISK_BYTES + SLACK_BYTES
    assert victim.file_bytes("peers.sqlite*") < 1 << 20
    assert victim.file_bytes("events.jsonl*") < MAX_EVENT_BYTES
    assert victim.file_bytes("logs/*") < MAX_EVENT_BYTES
