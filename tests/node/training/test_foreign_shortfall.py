"""A run with `backfill_with_own`: a node alone also generates the foreign share of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ftis_node.config.manifest import parse_manifest
from ftis_node.telemetry.events import read_events
from tests.node.support import manifest_text
from tests.node.training.test_token_budget import run_whole_node

NUM_STEPS = 4


@pytest.mark.timeout(300)
async def test_a_node_alone_generates_the_foreign_share(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    manifest = parse_manifest(
        manifest_text(foreign_wait_s=0.5).replace("[step]", "[step]\nbackfill_with_own = true"), source="test"
    )
    await run_whole_node(tmp_path, tiny_models["s"], manifest=manifest, budget={"learn_steps": NUM_STEPS})
    steps = read_events(tmp_path / "events.jsonl", name="step")
    assert [event["own_groups"] for event in steps] == [4, *[8] * (NUM_STEPS - 1)], (
        "own groups did not replace the 4 missing foreign ones"
    )
    used = [event["group"] for event in read_events(tmp_path / "events.jsonl", name="taken")]
    assert len(used) == len(set(used)) == 4 + 8 * (NUM_STEPS - 1)
