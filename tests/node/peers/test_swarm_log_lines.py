"""Log lines about the swarm: each important change once, and how others find a node that is alone."""

import logging

import pytest

from ftis_node.gossip import SwarmPhase, SwarmState
from ftis_node.node.peers.swarm_log import SwarmLogLines

ADDRESS = "/ip4/192.168.1.5/tcp/4001/p2p/ID"


def lines_of(messages: SwarmLogLines, phase: SwarmPhase, reason: str, skew_s: float | None = None) -> list[str]:
    lines = messages.lines(SwarmState(phase, reason), clock_skew_s=skew_s, addresses=[ADDRESS])
    return [text for _, text in lines]


def test_each_change_is_logged_once():
    messages, logged = SwarmLogLines(), list[str]()
    for phase, reason, num_lines in (
        (SwarmPhase.STARTING, "looking for peers", 0),
        (SwarmPhase.STANDALONE, "no bootstrap peer answers, retrying in 3 s (refused\x1b[2J)", 1),
        (SwarmPhase.STANDALONE, "no bootstrap peer answers, retrying in 60 s (timeout)", 0),
        (SwarmPhase.STANDALONE, "1 peer connected, but no member of this run yet; looking now", 1),
        (SwarmPhase.STANDALONE, "7 peers connected, but no member of this run yet; looking in 9 s", 0),
        (SwarmPhase.CONNECTED, "1 other member of this run", 1),
        (SwarmPhase.CONNECTED, "2 other members of this run", 0),
        (SwarmPhase.STANDALONE, "no bootstrap peer answers, retrying now", 1),
    ):
        lines = lines_of(messages, phase, reason)
        assert len(lines) == num_lines, reason
        logged += lines
    assert "retrying in 3 s (refused [2J)" in logged[0]
    assert logged[2] == "in the swarm: 1 other member of this run"


def test_a_node_without_peers_logs_how_it_is_found():
    reason = "no peers were given; waiting for others to dial this node"
    assert lines_of(SwarmLogLines(), SwarmPhase.STANDALONE, reason) == [
        f"working alone: no peers were given; others join it with --peers {ADDRESS}"
    ]


@pytest.mark.parametrize(
    ("skews_s", "line"),
    [
        ((0.5, 1.2, 0.9, 4.0), "this machine's clock is 1.2 s behind the peers', they refuse us at 3 s"),
        ((-4.0, -4.1), "this machine's clock is 4.0 s ahead of the peers', they refuse what we send"),
    ],
)
def test_a_wrong_clock_is_logged_once(skews_s, line):
    messages = SwarmLogLines()
    (logged,) = [each for skew_s in skews_s for each in lines_of(messages, SwarmPhase.STARTING, "", skew_s)]
    assert logged.startswith(line)


def test_a_newer_release_is_logged_once():
    messages, logged = SwarmLogLines(), list[tuple[int, str]]()
    for release in ("", "2 of 3 run 2", "3 of 3 run 2"):
        state = SwarmState(SwarmPhase.STARTING, "")
        logged += messages.lines(state, clock_skew_s=None, addresses=[], release=release)
    assert logged == [(logging.INFO, "2 of 3 run 2")]
