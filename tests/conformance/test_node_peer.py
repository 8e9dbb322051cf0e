"""A peer in another language in a real run: `examples/node-peer`, written from docs/reference/wire-format.md."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from ftis_node.records.codec import CODECS
from tests.conformance.make_messages import ACCEPTED, MESSAGES
from tests.conftest import EXAMPLES
from tests.node.support import ANY_PORT, RunningNode, bootstrap, started, write_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PEER = EXAMPLES / "node-peer"
START_S = 240.0
ANSWER_S = 90.0
CHECK = Path(__file__).with_name("check_kit.mjs")
BY_THE_FORM = {"parse", "version", "malformed", "run", "signature"}  # verdicts that need no state of a node
LIES = ("reward_mismatch", "prompt_mismatch", "logprobs", "sampling", "malformed")


class _Run(NamedTuple):
    """A run with one node, whose address is in the directory."""

    address: str
    run_id: str
    model: Path
    node: RunningNode
    folder: Path


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> Iterator[_Run]:
    """A bootstrap node, and a node that sends in the codec `lossless` and waits for groups of others."""
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
def _peer(run: _Run, name: str, *lie: str) -> Iterator[Path]:
    """The peer in Node.js, until the block ends; gives the file of its events."""
    output = run.folder / f"{name}.jsonl"
    command = ["node", str(PEER / "peer.js"), run.address, run.run_id, str(run.model), *lie]
    with output.open("wb") as stdout, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout) as process:
        try:
            yield output
        finally:
            process.kill()


def _events(output: Path, name: str) -> list[dict[str, Any]]:
    """The events of that name which the peer has printed whole."""
    lines = output.read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == name]


@pytest.mark.timeout(600)
def test_its_groups_are_admitted_and_it_reads_those_of_the_node(a_run: _Run) -> None:
    node, node_id = a_run.node, a_run.node.peer_id()
    with _peer(a_run, "honest") as output:
        confirmed = node.wait_for(lambda: _events(output, "confirmed"), timeout_s=ANSWER_S)
        pulled = node.wait_for(lambda: _events(output, "pulled"), timeout_s=ANSWER_S)
        (joined,) = _events(output, "joined")
        node.wait_for(
            lambda: [event for event in node.events("confirmed") if event["peer"] == joined["peer"]],
            timeout_s=ANSWER_S,
        )
        assert joined["members"] == [node_id]
        assert {event["by"] for event in confirmed} == {node_id}
        assert _events(output, "rejected") == []
    admitted = {event["group"] for event in node.events("admitted") if event["sender"] == joined["peer"]}
    assert confirmed[0]["group"] in admitted
    assert node.events("refused") == []
    assert pulled[0]["group"] in {event["group"] for event in node.events("announced")}
    assert (pulled[0]["sender"], pulled[0]["codec"]) == (node_id, CODECS["lossless"])
    assert len(pulled[0]["texts"]) == 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_refused_by_its_name(a_run: _Run, lie: str) -> None:
    node = a_run.node
    with _peer(a_run, lie, lie) as output:
        (joined,) = node.wait_for(lambda: _events(output, "joined"), timeout_s=ANSWER_S)
        refused = node.wait_for(
            lambda: [event for event in node.events("refused") if event["origin"] == joined["peer"]],
            timeout_s=ANSWER_S,
        )
    assert {event["reason"] for event in refused} == {lie}
    assert not [event for event in node.events("admitted") if event["sender"] == joined["peer"]]


def test_its_reader_gives_the_verdicts_of_the_kit() -> None:
    groups = json.loads(MESSAGES.read_text())["groups"]
    done = subprocess.run(["node", str(CHECK), str(MESSAGES)], capture_output=True, text=True, check=True)
    found = {group["case"]: verdict for group, verdict in zip(groups, json.loads(done.stdout), strict=True)}
    expected = {group["case"]: group["verdict"] for group in groups if group["verdict"] not in ("codec", "banned")}
    for case, verdict in expected.items():
        assert found[case] == (verdict if verdict in BY_THE_FORM else ACCEPTED), case
    assert set(expected.values()) >= BY_THE_FORM
