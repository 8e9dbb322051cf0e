"""A peer in another language in a real run: `examples/node-peer`, written from the wire format page."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ftis_node.records.codec import CODECS
from tests.conformance.make_messages import ACCEPTED, MESSAGES
from tests.conftest import EXAMPLES
from tests.node.support import ANY_PORT, RunningNode, bootstrap, started, write_manifest

PEER = EXAMPLES / "node-peer"
START_S = 240.0
ANSWER_S = 90.0
CHECK = Path(__file__).with_name("check_kit.mjs")
STATELESS = {"parse", "version", "malformed", "run", "signature"}  # verdicts that need no state of a node
FALSE_CLAIMS = ("reward_mismatch", "prompt_mismatch", "logprobs", "sampling", "malformed")


class _Run(NamedTuple):
    """A run with a bootstrap node and one node."""

    address: str
    run_id: str
    model: Path
    node: RunningNode
    folder: Path


@pytest.fixture(scope="module")
def one_node_run(tmp_path_factory, tiny_models):
    """Yield a run whose node sends with the codec `lossless` and waits for foreign groups."""
    folder = tmp_path_factory.mktemp("run")
    manifest = write_manifest(folder / "run.toml", foreign_wait_s=600.0)
    (folder / "ann").mkdir()
    (folder / "ann" / "node.toml").write_text('[swarm]\ncodec = "lossless"\n')
    with ExitStack() as stack:
        address = stack.enter_context(bootstrap(folder / "bootstrap"))
        model = tiny_models["s"]
        join = ("join", "--model", str(model), "--task", "arithmetic", "--run", str(manifest), "--peers", address)
        node = stack.enter_context(started(folder / "ann", *join, "--listen", ANY_PORT, "--steps", "1000"))
        node.wait_for(lambda: node.events("announced"), timeout_s=START_S)
        yield _Run(address, node.status()["run"]["id"], model, node, folder)


@contextmanager
def _peer(run: _Run, name: str, *claim: str) -> Iterator[Path]:
    """Run the peer in Node.js, and yield the file of its events."""
    output = run.folder / f"{name}.jsonl"
    command = ["node", str(PEER / "peer.js"), run.address, run.run_id, str(run.model), *claim]
    with output.open("wb") as stdout, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout) as process:
        try:
            yield output
        finally:
            process.kill()


def _events(output: Path, name: str) -> list[dict[str, Any]]:
    """Return the complete events with that name."""
    lines = output.read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == name]


@pytest.mark.timeout(600)
def test_node_and_peer_admit_each_others_groups(one_node_run):
    node, node_id = one_node_run.node, one_node_run.node.peer_id()
    with _peer(one_node_run, "honest") as output:
        confirmed = node.wait_for(lambda: _events(output, "confirmed"), timeout_s=ANSWER_S)
        pulled = node.wait_for(lambda: _events(output, "pulled"), timeout_s=ANSWER_S)
        (joined,) = _events(output, "joined")
        node.wait_for(
            lambda: [event for event in node.events("confirmed") if event["peer"] == joined["peer"]], timeout_s=ANSWER_S
        )
        assert joined["members"] == [node_id]
        assert {event["by"] for event in confirmed} == {node_id}
        assert _events(output, "refused") == []
    admitted = {event["group"] for event in node.events("admitted") if event["sender"] == joined["peer"]}
    assert confirmed[0]["group"] in admitted and node.events("refused") == []
    assert pulled[0]["group"] in {event["group"] for event in node.events("announced")}
    assert (pulled[0]["sender"], pulled[0]["codec"]) == (node_id, CODECS["lossless"])
    assert len(pulled[0]["texts"]) == 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("claim", FALSE_CLAIMS)
def test_each_false_claim_is_refused_by_its_name(one_node_run, claim):
    node = one_node_run.node
    with _peer(one_node_run, claim, claim) as output:
        (joined,) = node.wait_for(lambda: _events(output, "joined"), timeout_s=ANSWER_S)
        refused = node.wait_for(
            lambda: [event for event in node.events("refused") if event["origin"] == joined["peer"]], timeout_s=ANSWER_S
        )
    assert {event["reason"] for event in refused} == {claim}
    assert not [event for event in node.events("admitted") if event["sender"] == joined["peer"]]


def test_the_reader_of_the_peer_returns_the_verdicts_of_the_kit():
    groups = json.loads(MESSAGES.read_text())["groups"]
    result = subprocess.run(["node", str(CHECK), str(MESSAGES)], capture_output=True, text=True, check=True)
    found = {group["case"]: verdict for group, verdict in zip(groups, json.loads(result.stdout), strict=True)}
    expected = {group["case"]: group["verdict"] for group in groups if group["verdict"] not in ("codec", "banned")}
    for case, verdict in expected.items():
        assert found[case] == (verdict if verdict in STATELESS else ACCEPTED), case
    assert set(expected.values()) >= STATELESS
