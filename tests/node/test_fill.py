"""A run that fills its steps, as a real process: alone, a node makes the foreign share as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.node.support import ANY_PORT, started, write_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

START_S = 120.0
NUM_STEPS = 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_alone_makes_up_for_the_foreign_share(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    run = write_manifest(tmp_path / "run.toml", patience_s=0.5)
    run.write_text(run.read_text().replace("[step]", "[step]\nfill = true"))
    join = ("join", "--model", str(tiny_models["s"]), "--run", str(run), "--listen", ANY_PORT)
    with started(tmp_path / "node", *join, "--steps", str(NUM_STEPS)) as node:
        assert node.wait(timeout_s=START_S) == 0, node.log.read_text()[-3000:]
    steps = node.events("step")
    assert [event["own_groups"] for event in steps] == [4, *[8] * (NUM_STEPS - 1)], "4 foreign ones were missing"
    used = [event["group"] for event in node.events("taken")]
    assert len(used) == len(set(used)) == 4 + 8 * (NUM_STEPS - 1)
