"""A thousand invented members in the directory.

The file's name places it late among the attacks, because a victim in a swarm that looks large pulls only what its
learner needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_IDENTITIES = 1000


async def test_a_thousand_invented_members_hide_no_real_one(victim: Victim, attacker: Member, honest: Member) -> None:
    num_stored = await attacker.register_invented(NUM_IDENTITIES, ttl_s=300)
    assert num_stored > NUM_IDENTITIES // 2, "the entries are valid, so the directory stores them"
    accepted = (await victim.row(honest.peer_id))["groups_accepted"]

    async def continues() -> bool:
        return bool((await victim.row(honest.peer_id))["groups_accepted"] > accepted + 4)

    await victim.until(continues)
    assert (await victim.status())["swarm"]["state"] == "connected"
