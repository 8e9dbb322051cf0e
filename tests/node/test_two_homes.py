"""Two nodes of one user on one machine, each with its home and default settings: neither disturbs the other."""

import json

import pytest

from ftis_node.cli.app import run
from tests.node.support import started

pytestmark = pytest.mark.timeout(600)
START_S = 240.0


@pytest.fixture(scope="module")
def lone(tmp_path_factory, small_swarm):
    """A node with the swarm's run and secret that is given no peers."""
    home = tmp_path_factory.mktemp("lone") / "home"
    home.mkdir()
    (home / "node.toml").write_text(f'[swarm]\nsecret_file = "{small_swarm.secret}"\n')
    join = ("join", "--model", str(small_swarm.models["s"]), "--run", str(small_swarm.manifest))
    with started(home, *join) as node:
        node.wait_for(lambda: node.events("admitted"), timeout_s=START_S)
        yield node


def test_two_nodes_with_default_ports_run_side_by_side(small_swarm, lone, tmp_path, monkeypatch, capsys):
    def document(node, *command, by_variable=False):
        """Return what a command prints about a node, with its home given by the option or by the variable."""
        monkeypatch.setenv("FTIS_HOME", str(node.home if by_variable else tmp_path / "none"))
        capsys.readouterr()
        assert run([*command, "--json", *(() if by_variable else ("--home", str(node.home)))]) == 0
        return json.loads(capsys.readouterr().out)

    nodes = (lone, small_swarm.ann)
    known = [document(node, "status", by_variable=node is lone)["node"] for node in nodes]
    peer_ids = [one["peer_id"] for one in known]
    assert len(set(peer_ids)) == 2
    own = [document(node, "identity", "show", by_variable=node is not lone)["peer_id"] for node in nodes]
    assert own == peer_ids
    assert all(one["addresses"] for one in known)
    assert not set(known[0]["addresses"]) & set(known[1]["addresses"])
    for node, peer_id in zip(nodes, peer_ids, strict=True):
        groups = document(node, "replay", "list", "--limit", "1000")
        assert {group["sender"] for group in groups if group["own"]} == {peer_id}
        assert document(node, "replay", "stats")["groups_own"] >= sum(group["own"] for group in groups)
        others = {group["sender"] for group in groups} | {peer["peer_id"] for peer in document(node, "peers")}
        assert not others & (set(peer_ids) - {peer_id}), "a node knows the other"
    assert document(lone, "peers") == []
