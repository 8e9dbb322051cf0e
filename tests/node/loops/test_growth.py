"""A node's stored data is bounded while it does not train, and over a long run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.stubs.stub_node import stub_group
from ftis_node.node import context
from ftis_node.node.context import EvaluationHistory
from ftis_node.node.storage import node_store
from ftis_node.telemetry.status import EvalStatus
from tests.node.light_swarm import RNG, LightSwarm, held, manifest_of
from tests.waiting import eventually

LONG = 700  # tokens per completion: about 70 kB per group


async def test_a_node_that_does_not_train_keeps_its_disk_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTIS_BUFFER__MAX_DISK_BYTES", str(1 << 20))
    monkeypatch.setattr(node_store, "MAX_READY_GROUPS", 2)
    swarm = LightSwarm(tmp_path, manifest_of())
    async with swarm.node(1) as alice, swarm.node(2) as bob:
        for _ in range(20):
            await alice.publish(stub_group(alice.parts.context.identity, swarm.manifest, RNG, num_tokens=LONG))
        await eventually(lambda: held(bob) == 20)
        await bob.parts.store.disk(bob.parts.store.buffer.take, 1, own=0, foreign=2)
        await bob.parts.store.disk(bob.parts.store.buffer.release_step, 1, "trained")
        before = bob.parts.store.reader.kept_bytes()
        await bob.parts.store.enforce_bounds(bob.parts.peers.share_cap())
        kept = bob.parts.store.reader.kept_bytes()
        assert before > 1 << 20 >= kept, "the oldest evicted groups are still there"
        assert bob.parts.store.reader.figures().released["trained"] == 2, (
            "groups of a step after the newest checkpoint were removed"
        )
        assert bob.parts.store.reader.figures().groups_foreign == 20


def test_the_status_keeps_the_first_and_the_newest_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_EVALUATIONS", 4)
    history = EvaluationHistory()
    for step in range(0, 50, 5):
        for task in ("a", "b"):
            history.add(EvalStatus(step=step, task=task, pass_at_1=0.5, n=8))
    assert [(entry.step, entry.task) for entry in history.entries] == [(0, "a"), (0, "b"), (45, "a"), (45, "b")]
