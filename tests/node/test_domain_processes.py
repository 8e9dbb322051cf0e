"""Domains and budgets of real nodes over p2pd: peers see the domain, the home keeps it, a used budget ends the node."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.node.support import ANY_PORT, RunningNode, bootstrap, manifest_text, started

START_S = 120.0
NEAR, FAR = "arithmetic:add", "arithmetic:sub"


def peers(node: RunningNode) -> dict[str, Any]:
    """Return the node's peers by name."""
    return {row["name"]: row for row in node.peers()}


@pytest.mark.timeout(900)
def test_a_learner_and_a_generator_of_a_domain_with_a_budget(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    run = tmp_path / "run.toml"
    run.write_text(manifest_text(foreign_wait_s=2.0).replace('task = "arithmetic"', f'task = "{NEAR}+{FAR}"'))
    with ExitStack() as stack:
        address = stack.enter_context(bootstrap(tmp_path / "bootstrap"))
        common = ("--model", str(tiny_models["s"]), "--run", str(run), "--peers", address, "--listen", ANY_PORT)
        quick = {"ftis_node.node.loops.directory.RECORD_PERIOD_S": 1.0}
        far = ("--role", "learner", "--name", "learner", "--task", FAR, *common)
        learner = stack.enter_context(started(tmp_path / "learner", "join", *far, constants=quick))
        learner.wait_for(lambda: "--follow" in learner.log.read_text(), timeout_s=START_S)
        peer_id = learner.peer_id()
        (tmp_path / "generator").mkdir()
        (tmp_path / "generator" / "node.toml").write_text(f'task = "{NEAR}"\n[budget]\ngenerate_tokens = 200\n')
        follow = ("--role", "generator", "--follow", peer_id, "--name", "generator", *common)
        generator = stack.enter_context(started(tmp_path / "generator", "join", *follow, constants=quick))
        assert generator.wait(timeout_s=START_S) == 0, generator.log.read_text()[-3000:]
        status = generator.status()
        assert status["node"]["domain"] == NEAR
        assert (status["budget"]["generate_tokens"]["limit"], status["budget"]["generate_tokens"]["left"]) == (200, 0)
        assert {event["prompt"].split("/")[0] for event in generator.events("admitted")} == {NEAR}
        learner.wait_for(lambda: learner.events("step"), timeout_s=60)
        assert learner.status()["node"]["domain"] == FAR

        groups = status["generation"]["groups_made"]
        more = (*follow, "--generate-tokens", "100000")
        again = stack.enter_context(started(tmp_path / "generator", "join", *more, constants=quick))
        again.wait_for(lambda: len(again.events("admitted")) > groups, timeout_s=START_S)
        learner.wait_for(lambda: peers(learner).get("generator", {}).get("domain") == NEAR, timeout_s=90)
        again.stop()
        learner.stop()
        kept = stack.enter_context(
            started(tmp_path / "learner", "join", "--role", "learner", "--learn-tokens", "1", *common)
        )
        assert kept.wait(timeout_s=START_S) == 0, "its tokens are used up already"
        assert kept.status()["node"]["domain"] == FAR, "the home did not keep the domain"
