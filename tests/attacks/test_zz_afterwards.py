"""After all of it: the victim trains on, has kept its memory and its disk, and honest groups still arrive.

The last file of the folder: run alone, it shows the same of a victim that nobody attacked.
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
SLACK_BYTES = 6 << 20  # SQLite's write-ahead log, and its pages' unused rest
MAX_EVENT_BYTES = 8 << 20


async def test_the_victim_trains_on_and_honest_groups_still_arrive(victim: Victim, honest: Member) -> None:
    step = (await victim.status())["learner"]["step"]
    accepted = (await victim.row(honest.peer_id))["groups_accepted"]

    async def goes_on() -> bool:
        row = await victim.row(honest.peer_id)
        return bool((await victim.status())["learner"]["step"] >= step + 2 and row["groups_accepted"] > accepted + 4)

    await victim.until(goes_on, within_s=60)
    assert victim.node.process.poll() is None
    assert len(victim.node.events("start")) == 1, "the node was never started again"
    assert (await victim.status())["learner"]["restarts"] == 0
    row = await victim.row(honest.peer_id)
    assert row["standing"] == "good"
    assert row["groups_refused"] == {}
    fetched = await honest.gossip.fetch(honest.victim_id, [bytes(32)])
    assert fetched.outcome == "complete", "and is served"


async def test_its_memory_has_not_grown(victim: Victim, honest: Member) -> None:
    grown = victim.resident_bytes() - victim.resident_bytes_before
    assert grown < MAX_GROWTH_BYTES, f"{grown / 2**20:.0f} MiB more than before the attacks"


async def test_its_disk_stays_under_its_cap(victim: Victim, honest: Member) -> None:
    assert victim.file_bytes("replay.sqlite*") < MAX_DISK_BYTES + SLACK_BYTES
    assert victim.file_bytes("peers.sqlite*") < 1 << 20
    assert victim.file_bytes("events.jsonl*") < MAX_EVENT_BYTES
    assert victim.file_bytes("logs/*") < MAX_EVENT_BYTES
