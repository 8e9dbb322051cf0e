"""Parts without a network: addresses to dial, connection state, the queue."""

import pytest

from ftis_node.gossip import GossipCounters, GossipMessage, SwarmPhase
from ftis_node.gossip.directory.entries import is_of_another
from ftis_node.gossip.multiaddr import usable_addresses
from ftis_node.gossip.pubsub import AnnouncementQueue
from ftis_node.gossip.types import ConnectionFacts
from ftis_node.swarm.lru import LruDict
from tests.gossip.helpers import PEER, RELAY


def test_claimed_addresses_must_name_the_claimant():
    valid = f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}"
    claimed = [valid, f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}", "/ip4/1.2.3.4/tcp/1", "invalid", ""]
    assert usable_addresses(PEER, claimed) == ["/ip4/1.2.3.4/tcp/1"]
    assert usable_addresses(PEER, claimed[1:]) == ["/ip4/1.2.3.4/tcp/1"], "the peer id may be omitted"
    assert usable_addresses(PEER, claimed[1:2]) == []


def test_no_member_makes_a_node_dial_link_local_addresses():
    private = ["/ip4/192.168.1.1/tcp/80", "/ip4/100.64.0.1/tcp/80", "/ip6/fd00::1/tcp/80", "/dns4/host/tcp/80"]
    assert usable_addresses(PEER, ["/ip4/169.254.169.254/tcp/80/ws", "/ip6/fe80::1/tcp/80", *private]) == private


@pytest.mark.parametrize(
    ("facts", "phase", "reason"),
    [
        (ConnectionFacts(num_given=1), SwarmPhase.STARTING, "looking for peers"),
        (ConnectionFacts(num_members=1, num_connected=2), SwarmPhase.CONNECTED, "1 other member of this run"),
        (ConnectionFacts(has_looked=True), SwarmPhase.STANDALONE, "no peers were given"),
        (
            ConnectionFacts(num_given=2, dial_error="refused", has_looked=True),
            SwarmPhase.STANDALONE,
            "no bootstrap peer answers, retrying in 40 s (refused)",
        ),
        (
            ConnectionFacts(num_given=2, num_given_connected=1, num_connected=1, has_looked=True),
            SwarmPhase.STANDALONE,
            "1 peer connected, but no member of this run yet; looking again in 40 s",
        ),
        (ConnectionFacts(num_connected=2, has_looked=True), SwarmPhase.STANDALONE, "2 peers connected, but no member"),
    ],
)
def test_the_connection_state_has_a_phase_and_a_reason(facts, phase, reason):
    state = facts.describe(next_try_in_s=40.2)
    assert state.state is phase
    assert state.reason.startswith(reason)


async def test_a_fault_is_raised_after_the_waiting_announcements():
    queue = AnnouncementQueue(capacity=3, counters=GossipCounters())
    queue.put(GossipMessage("peer", b"last"))
    queue.close(RuntimeError("a bug"))
    announcements = queue.drain()
    assert (await anext(announcements)).payload == b"last"
    with pytest.raises(RuntimeError, match="a bug"):
        await anext(announcements)


async def test_messages_dropped_before_anyone_reads_are_no_fault_to_report():
    """A generator follows its shard, but reads no announcements."""
    counters = GossipCounters()
    queue = AnnouncementQueue(capacity=3, counters=counters)
    for number in range(5):
        queue.put(GossipMessage("peer", b"%d" % number))
    assert (counters.announcements_received, counters.announcements_dropped) == (5, 0)
    assert (await anext(queue.drain())).payload == b"2"
    for number in range(5):
        queue.put(GossipMessage("peer", b"%d" % number))
    assert counters.announcements_dropped == 4


def test_an_entry_from_before_a_restart_is_not_of_another_node():
    assert not is_of_another(100.0, own=())
    own = LruDict[float, None](64)
    own[400.0] = None
    assert not is_of_another(399.0, own=own), "from before a restart"
    assert not is_of_another(400.0, own=own)
    assert is_of_another(401.0, own=own)
    for number in range(1000):
        own[500.0 + number] = None
    assert not is_of_another(400.0, own=own), "an own entry that was dropped from the bounded table"
    assert not is_of_another(1499.0, own=own)
    assert is_of_another(1499.5, own=own)
