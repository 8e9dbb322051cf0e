"""A thousand invented members in the directory.

This file runs late: a victim in a swarm that looks large pulls only what its learner needs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.gossip.wire_format import bucket_key
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import bucket_of

if TYPE_CHECKING:
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_IDENTITIES = 1000


async def test_a_thousand_invented_members_hide_no_real_one(victim: Victim, attacker: Member, honest: Member) -> None:
    run_id, node = attacker.maker.manifest.run_id, attacker.link.directory._node
    expires_at = time.time() + 300
    payload = pack_member(["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWNobody"], num_shards=1)
    invented = [Identity.generate() for _ in range(NUM_IDENTITIES)]
    stored = await node.store_many(
        [bucket_key(run_id, bucket_of(one.peer_id)) for one in invented],
        [sign_entry(one, EntryKind.MEMBER, run_id, payload, expires_at=expires_at) for one in invented],
        expires_at,
        subkeys=[one.peer_id for one in invented],
    )
    assert sum(map(bool, stored.values())) > NUM_IDENTITIES // 2, "the entries are valid, so the directory stores them"
    accepted = (await victim.row(honest.peer_id))["groups_accepted"]

    async def continues() -> bool:
        return bool((await victim.row(honest.peer_id))["groups_accepted"] > accepted + 4)

    await victim.until(continues)
    assert (await victim.status())["swarm"]["state"] == "connected"
