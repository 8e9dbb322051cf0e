"""A bootstrap node forwards the topics of the largest runs, however many runs a stranger registers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ftis_node.gossip.bootstrap import MAX_TOPICS, BootstrapNode, TopicForwarder
from ftis_node.gossip.directory.validators import StoredRun
from ftis_node.gossip.wire_format import topic
from ftis_node.records.identity import Identity
from tests.gossip.helpers import settings

if TYPE_CHECKING:
    from pathlib import Path

LARGER = "ff" * 16
STRANGERS = {f"{number:032x}": StoredRun(8, 1) for number in range(MAX_TOPICS)}


async def test_runs_of_a_stranger_take_no_topic_from_a_larger_run(tmp_path: Path) -> None:
    node = BootstrapNode(settings(tmp_path / "b"), identity=Identity.generate())
    await node.start()
    try:
        assert (session := node._supervisor.session) is not None
        forwarder = TopicForwarder(session, poll_interval_s=600)
        async with asyncio.TaskGroup() as group:
            forwarder._follow(STRANGERS, group)
            assert len(forwarder._reading) == MAX_TOPICS
            forwarder._follow({LARGER: StoredRun(8, 3)} | STRANGERS, group)
            followed = set(forwarder._reading)
            for task in forwarder._reading.values():
                task.cancel()
    finally:
        await node.close()
    assert len(followed) == MAX_TOPICS
    assert {topic(LARGER, shard) for shard in range(8)} <= followed
