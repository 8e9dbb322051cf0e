"""A generator's slots: a slot is free again when a peer has the group or the group is too old."""

import asyncio
import time

import pytest

from ftis_node.config.node import NodeSettings
from ftis_node.node.training.group_limits import SlotPool
from ftis_node.node.wiring import Wiring
from ftis_node.records.identity import Identity
from tests.node.nodes import ME, components, events_of
from tests.replay.test_buffer import accepted

PEER = Identity.from_seed(bytes([2]) * 32).peer_id


@pytest.mark.parametrize("reason", ["delivered", "stale", "ahead"])
async def test_a_delivered_or_stale_group_frees_its_slot(tmp_path, reason):
    """Peers refuse a group from the future, which was made before the clock was set back."""
    settings = NodeSettings(model="m", role="generator", roles={"follow": PEER})
    with components(tmp_path, settings=settings, slots=SlotPool(1, held=1)) as node:
        age_s = {"stale": node.context.manifest.step.max_age_s + 1, "ahead": -7200}.get(reason, 0)
        group = accepted(ME, 1, created_at=time.time() - age_s)
        assert node.store.buffer.admit(group, own=True)
        if reason == "delivered":
            node.peers.confirmations.confirm(PEER, group.envelope.id)
        await Wiring(node).deliver_loop._release()
        expected = "delivered" if reason == "delivered" else "stale"
        assert [event["reason"] for event in events_of(node, "released")] == [expected]
        assert node.store.reader.ready_counts() == (0, 0)
        async with asyncio.timeout(5):
            await node.slots.charge()


async def test_a_group_that_no_peer_has_yet_keeps_its_slot(tmp_path):
    with components(tmp_path, slots=SlotPool(1, held=1)) as node:
        assert node.store.buffer.admit(accepted(ME, 1, created_at=time.time()), own=True)
        await Wiring(node).deliver_loop._release()
        assert events_of(node, "released") == []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await node.slots.charge()
