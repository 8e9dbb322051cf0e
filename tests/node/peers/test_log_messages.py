"""What the log says of the swarm: changes that matter, once, and how others find a node that is alone."""

from __future__ import annotations

from ftis_node.gossip import SwarmPhase, SwarmState
from ftis_node.node.loops.directory import SwarmLogMessages, how_to_be_found

ADDRESS = "/ip4/192.168.1.5/tcp/4001/p2p/ID"


def said(words: SwarmLogMessages, phase: SwarmPhase, reason: str, skew_s: float | None = None) -> list[str]:
    lines = words.lines(SwarmState(phase, reason), clock_skew_s=skew_s, addresses=[ADDRESS])
    return [line.text for line in lines]


def test_each_change_is_said_once() -> None:
    words = SwarmLogMessages()
    assert said(words, SwarmPhase.STARTING, "looking for peers") == []
    (dead,) = said(words, SwarmPhase.STANDALONE, "no bootstrap peer answers, retrying in 3 s (refused\x1b[2J)")
    assert "retrying in 3 s (refused [2J)" in dead
    assert said(words, SwarmPhase.STANDALONE, "no bootstrap peer answers, retrying in 60 s (timeout)") == []
    assert len(said(words, SwarmPhase.STANDALONE, "1 peer connected, but no member of this run yet; looking now")) == 1
    assert said(words, SwarmPhase.STANDALONE, "7 peers connected, but no member of this run yet; looking in 9 s") == []
    assert said(words, SwarmPhase.CONNECTED, "1 other member of this run") == [
        "in the swarm: 1 other member of this run"
    ]
    assert said(words, SwarmPhase.CONNECTED, "2 other members of this run") == []
    assert len(said(words, SwarmPhase.STANDALONE, "no bootstrap peer answers, retrying now")) == 1


def test_a_node_without_peers_says_how_it_is_found() -> None:
    reason = "no peers were given; waiting for others to dial this node"
    assert said(SwarmLogMessages(), SwarmPhase.STANDALONE, reason) == [
        f"working alone: no peers were given; others join it with --peers {ADDRESS}"
    ]


def test_of_many_addresses_the_one_that_reaches_furthest_is_told() -> None:
    local, public = "/ip4/127.0.0.1/tcp/1/p2p/ID", "/ip4/9.9.9.9/tcp/1/p2p/ID"
    assert how_to_be_found([local, ADDRESS, public]).endswith(public)
    assert how_to_be_found([local, ADDRESS]).endswith(ADDRESS)
    assert "no address yet" in how_to_be_found([])


def test_the_advice_to_update_is_said_once() -> None:
    words, connected = SwarmLogMessages(), SwarmState(SwarmPhase.CONNECTED, "3 other members of this run")
    told = [
        [line.text for line in words.lines(connected, clock_skew_s=None, addresses=[], advice=advice)]
        for advice in ("", "2 of 3 speak wire 2: update ftis-node", "3 of 3 speak wire 2: update ftis-node")
    ]
    assert told[1:] == [["2 of 3 speak wire 2: update ftis-node"], []]


def test_a_clock_is_told_when_it_goes_wrong_and_when_it_is_right_again() -> None:
    words = SwarmLogMessages()
    told = [said(words, SwarmPhase.STARTING, "", skew_s) for skew_s in (0.5, 1.2, 1.3, 0.9, 0.7, 0.6, -4.0)]
    assert [len(lines) for lines in told] == [0, 1, 0, 0, 1, 0, 1]
    assert told[1][0].startswith("this machine's clock is 1.2 s behind the peers', they refuse us at 3 s")
    assert told[6][0].startswith("this machine's clock is 4.0 s ahead of the peers', they refuse what we send")
