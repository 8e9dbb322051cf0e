"""The whole path: two real nodes with different models over loopback, from prompts to each other's gradients."""

import json
from pathlib import Path

import psutil
import pytest

from ftis_node.cli.app import run
from ftis_node.records.codec import unpack_group
from ftis_node.records.envelope import open_envelope
from tests.small_swarm import EVAL_EVERY_STEPS, MIN_STEPS, copied_home

pytestmark = pytest.mark.timeout(600)  # of the start of the swarm


def _ftis(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    code = run(list(arguments))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_two_nodes_with_different_models_learn_from_each_other(small_swarm, tmp_path, capsys):
    nodes = {"s": small_swarm.ann, "m": small_swarm.bob}
    announced = {size: {event["group"] for event in node.events("announced")} for size, node in nodes.items()}
    for size, other in (("s", "m"), ("m", "s")):
        node = nodes[size]
        status = node.status()
        step = status["learner"]["step"]
        assert step >= MIN_STEPS
        assert status["learner"]["foreign_groups"] >= (MIN_STEPS - 1) * 4
        assert status["swarm"]["groups_received"] >= status["learner"]["foreign_groups"]
        assert status["swarm"]["groups_confirmed"] > 0
        assert status["swarm"]["groups_refused"] == {}
        assert [entry["step"] for entry in status["eval"]] == list(range(0, step + 1, EVAL_EVERY_STEPS))
        admitted = [event for event in node.events("admitted") if not event["own"]]
        assert {event["group"] for event in admitted} <= announced[other], "a foreign group that was not announced"
        taken = [event["group"] for event in node.events("taken")]
        assert len(taken) == len(set(taken)), "a group was used twice"
        steps = node.events("step")
        assert [event["step"] for event in steps] == list(range(1, step + 1))
        (peer,) = [row for row in node.peers() if row["training"]]
        assert {sender["sender"] for sender in steps[-1]["by_sender"]} == {peer["peer_id"], status["node"]["peer_id"]}
        assert peer["training"]["groups"] == status["learner"]["foreign_groups"]
        assert peer["training"]["mean_kl"] > 0 and 0 <= peer["training"]["effective"] <= 1
        assert status["learner"]["mismatch_kl"] < 1e-6, "engine and learner compute different log-probs"
        assert status["learner"]["mismatch_share"] == 0
        assert status["generation"]["policy_version"] == status["model"]["policy_version"] > 0, (
            "new weights are not served"
        )
    measured = [event["mismatch_version"] for node in nodes.values() for event in node.events("step")]
    assert any(measured), "no mismatch was measured on groups of new weights"
    _check_exports(copied_home(small_swarm.ann, tmp_path / "home").root, tmp_path, capsys)


def _check_exports(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check what the commands print about the home of a stopped node."""

    def of_home(*command: str) -> str:
        return _ftis(capsys, *command, "--home", str(home))

    groups = json.loads(of_home("replay", "list", "--json", "--limit", "1000"))
    assert {group["own"] for group in groups} == {True, False}
    assert len(json.loads(of_home("replay", "show", groups[0]["id"][:12], "--json"))["completions"]) == 4
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
    assert figures["n"] == 32 and 0 <= figures["pass_at_1"] <= 1


HEAVY = ("libtorch", "/torch/", "/scipy/", "/vllm/")


def _heavy_files(process: psutil.Process) -> list[str]:
    return [file.path for file in process.memory_maps() if any(part in file.path for part in HEAVY)]


@pytest.mark.parametrize("name", ["bootstrap", "ann", "bob"])
def test_a_daemon_loads_no_torch(small_swarm, name):
    daemon, *others = getattr(small_swarm, name).processes()
    assert _heavy_files(daemon) == []
    workers = [process for process in others if ".worker" in " ".join(process.cmdline())]
    assert len(workers) == (0 if name == "bootstrap" else 2)
    assert all(_heavy_files(worker) for worker in workers), "the check does not see torch in a worker"
