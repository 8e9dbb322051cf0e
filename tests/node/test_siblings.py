"""Four siblings train together in one real swarm, with other chat templates, end tokens and time zones."""

from contextlib import ExitStack

import pytest

from ftis_node.config.home import Home
from tests.node.support import RunningNode, bootstrap, started
from tests.sibling_models import SIBLINGS, save_sibling

MANIFEST = """
name = "siblings"
task = "arithmetic"
[sampling]
group_size = 8
max_prompt_tokens = 96
max_completion_tokens = 8
max_total_tokens = 128
[step]
own_groups = 2
foreign_groups = 6
foreign_wait_s = 60
[optimizer]
learning_rate = 1e-4
[eval]
every_steps = 0
"""
ZONES = {"base": "Pacific/Auckland", "dated": "America/Los_Angeles"}
WAIT_S = 900.0  # on a busy machine


@pytest.fixture(scope="module")
def siblings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siblings")
    return {each.name: save_sibling(each, folder / each.name) for each in SIBLINGS}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "engines", [pytest.param({}, id="torch"), pytest.param({"chat": "vllm", "thinking": "vllm"}, id="vllm")]
)
def test_every_sibling_trains_on_groups_of_every_other(siblings, tmp_path, engines):
    run = tmp_path / "run.toml"
    run.write_text(MANIFEST)
    with bootstrap(tmp_path / "bootstrap") as address, ExitStack() as stack:

        def join(name):
            command = ("join", "--model", str(siblings[name]), "--run", str(run), "--peers", address, "--name", name)
            engine = engines.get(name, "torch")
            zone = {"TZ": ZONES[name]} if name in ZONES else {}
            return stack.enter_context(started(tmp_path / name, *command, "--engine", engine, **zone))

        nodes = {name: join(name) for name in siblings}
        for node in nodes.values():
            node.wait_for(Home(node.home).running_url, timeout_s=WAIT_S)
        ids = {name: node.peer_id() for name, node in nodes.items()}
        for name, node in nodes.items():
            others = {ids[other] for other in nodes if other != name}
            node.wait_for(lambda node=node, others=others: others <= _trained_senders(node), timeout_s=WAIT_S)
        for name, node in nodes.items():
            assert node.status()["swarm"]["groups_refused"] == {}, name
            for row in [each for each in node.peers() if each["peer_id"] in ids.values()]:
                assert (row["reasons"], row["groups_refused"], row["trust_level"]) == ({}, {}, "good"), (name, row)
                assert row["score"] >= 0
        for node in nodes.values():
            node.stop()


def _trained_senders(node: RunningNode) -> set[str]:
    """Return the peers whose groups with a signal this node's steps have used."""
    return {
        row["peer_id"]
        for row in node.peers()
        if row["training"] is not None and row["training"]["groups"] and row["training"].get("kept_fraction") != 0
    }
