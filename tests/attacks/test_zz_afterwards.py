"""After all attacks the victim trains, admits honest groups, and has not grown in memory or on disk.

This file runs last. Run alone, it tests a victim without attackers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.attacks.victim import MAX_DISK_BYTES

if TYPE_CHECKING:
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

MAX_GROWTH_BYTES = 50 << 20
SLACK_BYTES = 6 << 20  # SQLite's write-ahead log and unused parts of its pages
MAX_EVENT_BYTES = 8 << 20


async def test_the_victim_trains_and_admits_honest_groups(victim: Victim, honest: Member) -> None:
    step = (await victim.status())["learner"]["step"]
    accepted = (await victim.row(honest.peer_id))["groups_accepted"]

    async def continues() -> bool:
        row = await victim.row(honest.peer_id)
        return bool((await victim.status())["learner"]["step"] >= step + 2 and row["groups_accepted"] > accepted + 4)

    await victim.until(continues, within_s=60)
    assert victim.node.process.poll() is None
    assert len(victim.node.events("start")) == 1, "the node was started again"
    assert (await victim.status())["learner"]["restarts"] == 0
    row = await victim.row(honest.peer_id)
    assert row["standing"] == "good"
    assert row["groups_refused"] == {}
    fetched = await honest.gossip.fetch(honest.victim_id, [bytes(32)])
    assert fetched.outcome == "complete", "the honest peer is not served"


async def test_its_memory_has_not_grown(victim: Victim, honest: Member) -> None:
    grown = victim.resident_bytes() - victim.resident_bytes_before
    assert grown < MAX_GROWTH_BYTES, f"{grown / 2**20:.0f} MiB more than before the attacks"


async def test_its_disk_stays_under_its_cap(victim: Victim, honest: Member) -> None:
    assert victim.file_bytes("replay.sqlite*") < MAX_DISK_BYTES + SLACK_BYTES
    assert victim.file_bytes("peers.sqlite*") < 1 << 20
    assert victim.file_bytes("events.jsonl*") < MAX_EVENT_BYTES
    assert victim.file_bytes("logs/*") < MAX_EVENT_BYTES
