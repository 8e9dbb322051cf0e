"""A bootstrap node forwards the topics of the largest runs, even if an unknown peer registers many small ones."""

import asyncio

from ftis_node.gossip.bootstrap import MAX_TOPICS
from ftis_node.gossip.directory.validators import StoredRun
from ftis_node.gossip.wire_format import topic
from tests.waiting import eventually

LARGER = "ff" * 16
SMALL_RUNS = {f"{number:032x}": StoredRun(8, 1) for number in range(MAX_TOPICS)}


def _topics() -> set[str]:
    """Return the topics that are read now."""
    names = [task.get_name() for task in asyncio.all_tasks() if not task.cancelling()]
    return {name.removeprefix("topic ") for name in names if name.startswith("topic ")}


async def test_many_small_runs_take_no_topic_from_a_larger_run(start, monkeypatch):
    node = await start(run_id=None, forward_s=0.05)
    directory = node._supervisor.session.directory
    monkeypatch.setattr(directory, "stored_runs", lambda: SMALL_RUNS)
    await eventually(lambda: len(_topics()) == MAX_TOPICS)
    monkeypatch.setattr(directory, "stored_runs", lambda: {LARGER: StoredRun(8, 3)} | SMALL_RUNS)
    larger = {topic(LARGER, shard) for shard in range(8)}
    await eventually(lambda: larger <= _topics() and len(_topics()) == MAX_TOPICS)  # new ones first


async def test_larger_runs_take_no_topic_from_a_pinned_run(start, monkeypatch):
    node = await start(run_id=None, forward_s=0.05)
    node.pinned_runs = [LARGER, "ee" * 16]
    larger = {run_id: StoredRun(64, 11) for run_id in SMALL_RUNS}
    monkeypatch.setattr(node._supervisor.session.directory, "stored_runs", lambda: larger | {LARGER: StoredRun(8, 1)})
    expected = {topic(LARGER, shard) for shard in range(8)}
    await eventually(lambda: expected <= _topics() and len(_topics()) == MAX_TOPICS)
