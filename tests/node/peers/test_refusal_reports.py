"""Refused groups are shown at both ends: in the log, the status and `status`; a peer's text is harmless."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from bench.stubs.stub_node import StubNode
from ftis_node.node.peers.copied_groups import CopyCatalog
from ftis_node.node.peers.peer_registry import PeerActivity
from ftis_node.telemetry.status import SwarmStatus
from tests.node.light_swarm import LightSwarm, identity_of, manifest_of
from tests.waiting import eventually

FIRST, SECOND = identity_of(1), identity_of(2)


@asynccontextmanager
async def two_nodes(swarm: LightSwarm) -> AsyncIterator[tuple[StubNode, StubNode]]:
    """Yield two light nodes whose upkeep loops run: they update the reports."""
    async with swarm.node(1) as one, swarm.node(2) as other, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(node.wiring.upkeep_loop.run()) for node in (one, other)]
        yield one, other
        for task in running:
            task.cancel()


def shown(node: StubNode) -> SwarmStatus:
    return node.wiring.swarm.status(members=[])


async def test_the_view_of_the_swarm_is_made_while_peers_come(tmp_path):
    """A thread makes it for the file of the status, while the event loop changes the table of peers."""

    class Changing(PeerActivity):
        @property  # type: ignore[override]
        def record(self) -> None:
            registry.seen(next(iter(registry.peers)))  # moves the first peer to the end of the table

        @record.setter
        def record(self, value: Any) -> None: ...

    async with LightSwarm(tmp_path, manifest_of()).node(1) as node:
        registry = node.parts.peers.registry
        for name in ("first", "second", "third"):
            registry.peers[name] = Changing()
        assert node.wiring.swarm.view().num_unreadable == 3


async def test_both_ends_learn_that_groups_are_refused_and_that_they_no_longer_are(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    swarm, reasons = LightSwarm(tmp_path, manifest_of()), {SECOND.peer_id: "duplicate_completions"}
    find = CopyCatalog.duplicate_reason

    def reason_of(copies, group, group_id):
        is_first = copies is one.parts.peers.copies
        return reasons.get(group.sender) if is_first else find(copies, group, group_id)

    monkeypatch.setattr(CopyCatalog, "duplicate_reason", reason_of)
    async with two_nodes(swarm) as (one, other):
        await swarm.publish(other, 5)
        await eventually(lambda: [each.groups for each in shown(one).refused_peers] == [5])
        await eventually(lambda: shown(other).refused_by)
        (refused,), (refusing,) = shown(one).refused_peers, shown(other).refused_by
        assert (refused.peer_id, refusing.peer_id) == (SECOND.peer_id, FIRST.peer_id)
        assert refused.reason == refusing.reason == "duplicate_completions"
        assert "give each node its own home and seed" in refused.advice == refusing.advice
        assert (shown(other).refused_peers, shown(one).refused_by) == ([], [])
        reasons.clear()
        await swarm.publish(other, 6)
        await eventually(lambda: not shown(one).refused_peers and not shown(other).refused_by)
    lines = [record.message for record in caplog.records if "refus" in record.message]
    expected = ("are refused as", "refuses this node's groups as", "are no longer refused", "no longer refuses")
    assert len(lines) == 4 and all(text in line for text, line in zip(expected, lines, strict=True)), lines
    assert [record.levelname for record in caplog.records if "refus" in record.message][:2] == ["WARNING", "WARNING"]


async def test_groups_of_another_tokenizer_are_refused_without_a_pull(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of())
    async with two_nodes(swarm) as (one, other):
        announcements: Any = one.wiring.announcements
        context = one.parts.context
        announcements.context = replace(context, about=replace(context.about, tokenizer="ab" * 16))
        await swarm.publish(other, 4)
        await eventually(lambda: [each.reason for each in shown(one).refused_peers] == ["tokenizer"])
        assert one.gossip.counters.envelopes_in == 0
        await eventually(lambda: shown(other).refused_by)
