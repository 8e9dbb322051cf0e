"""The whole path: two real nodes with different models over loopback, from prompts to each other's gradients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.records.codec import unpack_group
from ftis_node.records.envelope import open_envelope
from tests.node.support import ANY_PORT, bootstrap, started, write_manifest

STEPS = 4
START_S = 120.0


def _ftis(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command prints."""
    capsys.readouterr()
    code = run(list(arguments))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


@pytest.mark.timeout(400)
def test_two_nodes_with_different_models_learn_from_each_other(
    tmp_path: Path, tiny_models: Mapping[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # A busy machine may start one node minutes after the other.
    manifest = write_manifest(tmp_path / "run.toml", foreign_wait_s=150.0)
    with ExitStack() as stack:
        address = stack.enter_context(bootstrap(tmp_path / "bootstrap"))
        common = ("--run", str(manifest), "--peers", address, "--listen", ANY_PORT, "--steps", str(STEPS))
        nodes = {
            size: stack.enter_context(started(tmp_path / size, "join", "--model", str(model), "--name", size, *common))
            for size, model in tiny_models.items()
        }
        for node in nodes.values():
            assert node.wait(timeout_s=START_S + 60 * STEPS) == 0, node.log.read_text()[-3000:]
    announced = {size: {event["group"] for event in node.events("announced")} for size, node in nodes.items()}
    for size, other in (("s", "m"), ("m", "s")):
        node = nodes[size]
        status = node.status()
        assert status["learner"]["step"] == STEPS
        assert status["learner"]["own_groups"] == STEPS * 4
        assert status["learner"]["foreign_groups"] >= (STEPS - 1) * 4
        assert status["swarm"]["groups_received"] >= status["learner"]["foreign_groups"]
        assert status["swarm"]["groups_confirmed"] > 0
        assert status["swarm"]["groups_refused"] == {}
        assert [entry["step"] for entry in status["eval"]] == [0, 2, 4]
        admitted = [event for event in node.events("admitted") if not event["own"]]
        assert {event["group"] for event in admitted} <= announced[other], "a foreign group that was not announced"
        taken = [event["group"] for event in node.events("taken")]
        assert len(taken) == len(set(taken)), "a group was used twice"
        steps = node.events("step")
        assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
        (peer,) = [row for row in node.peers() if row["teaching"]]
        assert {sender["sender"] for sender in steps[-1]["by_sender"]} == {peer["peer_id"], status["node"]["peer_id"]}
        assert peer["teaching"]["groups"] == status["learner"]["foreign_groups"]
        assert peer["teaching"]["mean_kl"] > 0 and 0 <= peer["teaching"]["teaches"] <= 1
        assert status["learner"]["mismatch_kl"] < 1e-6, "engine and learner compute different log-probs"
        assert status["learner"]["mismatch_share"] == 0
        assert status["generation"]["policy_version"] == status["model"]["policy_version"] > 0, (
            "new weights are not served"
        )
    measured = [event["mismatch_version"] for node in nodes.values() for event in node.events("step")]
    assert any(measured), "no mismatch was measured on groups of new weights"
    _check_exports(nodes["s"].home, tmp_path, capsys)


def _check_exports(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check what the commands print about the home of a stopped node."""

    def of_home(*command: str) -> str:
        return _ftis(capsys, *command, "--home", str(home))

    groups = json.loads(of_home("replay", "list", "--json", "--limit", "1000"))
    assert {group["own"] for group in groups} == {True, False}
    shown = json.loads(of_home("replay", "show", groups[0]["id"][:12], "--json"))
    assert len(shown["completions"]) == 4
    of_home("replay", "export", "--format", "envelope", "--out", str(tmp_path / "envelopes"))
    files = list((tmp_path / "envelopes").iterdir())
    assert len(files) == len(groups)
    envelope = open_envelope(files[0].read_bytes())
    assert envelope.is_signed_by(unpack_group(envelope.body).sender)
    of_home("replay", "export", "--format", "jsonl", "--out", str(tmp_path / "groups.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert len(rows) == len(groups)
    of_home("replay", "export", "--format", "parquet", "--out", str(tmp_path / "groups.parquet"))
    assert (tmp_path / "groups.parquet").read_bytes()[:4] == b"PAR1"
    peers = json.loads(of_home("peers", "--json"))
    assert sum(peer["groups_accepted"] for peer in peers) == sum(not group["own"] for group in groups)
    of_home("export", "--out", str(tmp_path / "trained"))
    on_problems = ("--task", "arithmetic", "--limit", "32", "--max-tokens", "48", "--json")
    figures = json.loads(_ftis(capsys, "eval", "--model", str(tmp_path / "trained"), *on_problems))
    last = json.loads(of_home("status", "--json"))["eval"][-1]
    assert figures["pass_at_1"] == last["pass_at_1"], "the exported model is not the one that was evaluated"
    assert figures["n"] == 32
