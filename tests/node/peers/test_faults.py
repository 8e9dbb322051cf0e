"""The consequences of a peer's fault: counters, an event, less trust. They do not depend on its id."""

import pytest

from ftis_node.config.node import NodeSettings
from ftis_node.node.peers.peer_manager import FAULT, MAX_TEXT
from ftis_node.node.wiring import NodeComponents
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import Place
from ftis_node.telemetry.events import read_events
from tests.node.nodes import components

ME = Identity.from_seed(bytes([1]) * 32)
PEER, FRIEND = (Identity.from_seed(bytes([seed]) * 32).peer_id for seed in (2, 3))
FAULTS_TO_A_BAN = 6


@pytest.fixture
def node(tmp_path):
    settings = NodeSettings(model="m", access={"trust": (FRIEND,)})
    with components(tmp_path, identity=ME, settings=settings) as node:
        yield node


def fail(node: NodeComponents, peer_id: str, error: Exception) -> None:
    with node.gossip.guard.work_for(peer_id, Place.STORE):
        raise error


def test_a_fault_is_counted_with_the_peer_and_the_place(node):
    fail(node, PEER, OverflowError("too large"))
    assert node.context.counters.refused[FAULT] == node.peers.registry.peers[PEER].refused[FAULT] == 1
    (event,) = read_events(node.home.events, name="peer_fault")
    assert (event["peer"], event["place"], event["error"]) == (PEER, "store", "OverflowError: too large")


def test_several_faults_end_in_a_ban(node):
    for _ in range(FAULTS_TO_A_BAN):
        assert not node.peers.is_banned(PEER)
        fail(node, PEER, ValueError("invalid"))
    assert node.peers.is_banned(PEER)


@pytest.mark.parametrize("by_operator", [False, True], ids=["in node.toml", "by peers trust"])
def test_a_trusted_peer_is_paused_and_never_banned(node, *, by_operator):
    peer_id = PEER if by_operator else FRIEND
    if by_operator:
        node.peers.trust(peer_id)
    for _ in range(2 * FAULTS_TO_A_BAN):
        fail(node, peer_id, ValueError("invalid"))
    assert not node.peers.is_banned(peer_id)
    assert not node.gossip.guard.may_work(peer_id)
    assert node.peers.registry.peers[peer_id].refused[FAULT] == 2 * FAULTS_TO_A_BAN


@pytest.mark.parametrize("peer_id", ["", "\ud800", "QmRsa", "x" * 100_000, "12D3KooW\x1b[2J", "a\nb"])
def test_an_invalid_peer_id_is_not_stored(node, peer_id, caplog):
    """A stored id would be written into a database and shown on screens."""
    fail(node, peer_id, ValueError("invalid"))
    (line,) = caplog.messages
    assert line.isprintable() and len(line) < 200
    assert node.context.counters.refused[FAULT] == 1
    assert not node.peers.registry.peers
    assert node.peers.known() == [FRIEND]
    node.peers.save()
    (event,) = read_events(node.home.events, name="peer_fault")
    assert len(event["peer"]) <= MAX_TEXT
    assert event["peer"].isprintable()
