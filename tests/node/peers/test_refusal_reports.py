"""Refused groups are shown at both ends: in the log, the status and `status`; a peer's text is harmless."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftis_node.cli.status_screen import screen
from ftis_node.node.wiring import Wiring
from ftis_node.telemetry.health_summary import summarize_health
from ftis_node.telemetry.status import NodeStatus, RefusalStatus, Status, SwarmStatus
from tests.node.light_swarm import LightSwarm, identity_of, manifest_of
from tests.node.nodes import components
from tests.waiting import eventually

FIRST, SECOND = identity_of(1), identity_of(2)


async def test_both_ends_learn_that_groups_are_refused_and_that_they_no_longer_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    swarm = LightSwarm(tmp_path, manifest_of())
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(swarm.node(number)) for number in (1, 2)]
        peers: Any = one.parts.peers
        reasons: dict[str, str] = {SECOND.peer_id: "duplicate_completions"}
        peers.copies.duplicate_reason = lambda group, group_id: reasons.get(group.sender)
        await swarm.publish(other, 5)
        reports, theirs = one.wiring.refusals, other.wiring.refusals
        await eventually(lambda: reports.refused() and reports.refused()[0].groups == 5)
        await eventually(theirs.refused_by)
        (refused,), (refusing,) = reports.refused(), theirs.refused_by()
        assert (refused.peer_id, refusing.peer_id) == (SECOND.peer_id, FIRST.peer_id)
        assert refused.reason == refusing.reason == "duplicate_completions"
        assert "give each node its own home and seed" in refused.advice == refusing.advice
        assert one.wiring.swarm.status(members=[]).refused_peers == [refused]
        assert other.wiring.swarm.status(members=[]).refused_by == [refusing]
        assert (theirs.refused(), reports.refused_by()) == ([], [])
        reasons.clear()
        await swarm.publish(other, 6)
        await eventually(lambda: not reports.refused() and not theirs.refused_by())
    lines = [record.message for record in caplog.records if "refus" in record.message]
    expected = ("are refused as", "refuses this node's groups as", "are no longer refused", "no longer refuses")
    assert len(lines) == 4 and all(text in line for text, line in zip(expected, lines, strict=True)), lines
    assert [record.levelname for record in caplog.records if "refus" in record.message][:2] == ["WARNING", "WARNING"]


async def test_groups_of_another_tokenizer_are_refused_without_a_pull(tmp_path: Path) -> None:
    swarm = LightSwarm(tmp_path, manifest_of())
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(swarm.node(number)) for number in (1, 2)]
        announcements: Any = one.wiring.announcements
        announcements.about = replace(one.parts.context.about, tokenizer="ab" * 16)
        await swarm.publish(other, 4)
        await eventually(lambda: one.wiring.refusals.refused())
        assert one.wiring.refusals.refused()[0].reason == "tokenizer"
        assert one.gossip.counters.bodies_in == 0
        await eventually(lambda: other.wiring.refusals.refused_by())


async def test_an_operators_ban_is_published_as_a_ban_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with components(tmp_path) as node:
        node.peers.ban(SECOND.peer_id)
        caplog.clear()
        for _ in range(3):
            node.peers.note_unused(SECOND.peer_id, "banned")
        wiring = Wiring(node)
        await wiring.refusals.update()
        assert not caplog.records
        stats: Any = wiring.directory_loop.own_record.make().stats
        assert stats.refused_senders == ((SECOND.peer_id, "banned", 3),)


def claimed(reason: str) -> RefusalStatus:
    return RefusalStatus(SECOND.peer_id, "\x1b[31mbob\n", reason, "", 12, time.time() - 300, "use one home each")


def test_the_screen_names_peer_reason_time_and_remedy_and_escapes_a_peers_text() -> None:
    swarm = SwarmStatus(state="connected", peers_connected=1, groups_sent=40, refused_by=[claimed("\x1b[2Jfinish")])
    status = Status(node=NodeStatus(peer_id=FIRST.peer_id, state="running"), swarm=swarm)
    text = " ".join(line.strip() for line in screen(status, now=time.time()))
    assert "its groups are refused by" in text and "12 groups in 5 min: use one home each" in text
    assert "\x1b" not in text
    contributing = summarize_health(msgspec.structs.replace(status), now=time.time()).contributing
    assert "generation worker" in contributing.why, "a worker that is away matters more"
