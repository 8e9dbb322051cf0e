"""Two nodes of one user on one machine, each with its home and nothing else said: neither is in the other's way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.cli.app import run
from tests.node.support import started, write_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.node.support import RunningNode

START_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_with_default_ports_run_side_by_side(
    tmp_path: Path,
    tiny_models: Mapping[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    join = ("join", "--model", str(tiny_models["s"]), "--run", str(write_manifest(tmp_path / "run.toml", patience_s=0)))

    def document(node: RunningNode, *command: str, by_variable: bool = False) -> Any:
        """What a reading command says of a node, its home given by the option or by the environment."""
        monkeypatch.setenv("FTIS_HOME", str(node.home if by_variable else tmp_path / "nobody"))
        capsys.readouterr()
        assert run([*command, "--json", *(() if by_variable else ("--home", str(node.home)))]) == 0
        return json.loads(capsys.readouterr().out)

    with started(tmp_path / "one", *join) as one, started(tmp_path / "two", *join) as two:
        for node in (one, two):
            node.wait_for(lambda node=node: node.events("step"), timeout_s=START_S)
        peer_ids = {document(node, "status", by_variable=node is one)["node"]["peer_id"] for node in (one, two)}
        assert len(peer_ids) == 2
        known = [document(node, "identity", "show", by_variable=node is two) for node in (one, two)]
        assert {identity["peer_id"] for identity in known} == peer_ids
        assert all(identity["running"] for identity in known)
        assert not set(known[0]["addresses"]) & set(known[1]["addresses"])
        assert all(identity["addresses"] for identity in known)
        for node, identity in zip((one, two), known, strict=True):
            groups = document(node, "replay", "list")
            assert groups and {group["sender"] for group in groups} == {identity["peer_id"]}
            assert document(node, "peers") == [], "neither was told of the other"
            assert document(node, "replay", "stats")["groups_own"] >= len(groups)
        assert one.stop() < 10
        assert document(two, "status")["node"]["state"] == "running", "one's end is nothing to the other"
        assert two.stop() < 10
