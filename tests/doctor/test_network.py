"""`doctor --peers` reports how each address fails, clocks that differ, and whether peers reach this machine."""

import pytest

from ftis_node.doctor.network import judge
from ftis_node.gossip.bootstrap import BootstrapNode
from ftis_node.gossip.dialer import AddressProbe, NetworkProbe, probe_network
from ftis_node.gossip.multiaddr import Reachability, parse_multiaddr
from ftis_node.gossip.p2pd.relay_limit import RelayLimit
from ftis_node.records.identity import Identity
from tests.gossip.helpers import LOOPBACK, PEER, settings

ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}"
REFUSED = "failed to dial X: all dials failed * [/ip4/192.0.2.1/tcp/4001] dial tcp4 192.0.2.1:4001: connection refused"
REACHED = AddressProbe(ADDRESS, dial_s=0.02, is_in_directory=True, clock_skew_s=0.1)


def _levels(*probes: AddressProbe, reachability: Reachability = Reachability.PUBLIC) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in judge(NetworkProbe(probes, reachability))]


@pytest.mark.parametrize(
    ("skew_s", "level", "text"),
    [(0.9, "ok", "+0.90 s"), (-1.5, "warn", "1.5 s ahead of the peers'"), (3.5, "fail", "3.5 s behind the peers'")],
)
def test_clocks_that_differ_are_reported(skew_s, level, text):
    probe = AddressProbe(ADDRESS, is_in_directory=True, clock_skew_s=skew_s)
    (clock,) = [found for found in judge(NetworkProbe((probe,), Reachability.PUBLIC)) if found.id == "clock.peers"]
    assert (clock.level, text in clock.finding, "3 s" in clock.advice) == (level, True, level != "ok")


def test_an_unreachable_address_fails_if_no_other_is_reached():
    unreachable = AddressProbe(ADDRESS, error=REFUSED)
    assert _levels(unreachable) == [("peer", "fail"), ("nat", "ok")]
    assert _levels(unreachable, REACHED) == [("peer", "warn"), ("peer", "ok"), ("clock", "ok"), ("nat", "ok")]
    first = next(judge(NetworkProbe((unreachable,), Reachability.PUBLIC)))
    assert first.finding == f"{ADDRESS}: dial tcp4 192.0.2.1:4001: connection refused"
    assert first.advice.startswith("nothing listens there")


def test_a_relay_with_low_limits_and_a_peer_outside_the_directory_are_warnings():
    small = AddressProbe(ADDRESS, is_in_directory=True, relay_limit=RelayLimit(num_bytes=131072, duration_s=120))
    outside = AddressProbe(ADDRESS)
    relay, peer, nat = judge(NetworkProbe((small, outside), Reachability.LOCAL))
    assert (relay.level, peer.level, nat.check) == ("warn", "warn", "nat")
    assert "128 KiB" in relay.finding and "directory" in peer.finding


@pytest.mark.timeout(90)  # one p2pd for each address
async def test_each_address_is_dialed_separately(tmp_path):
    node = BootstrapNode(settings(tmp_path / "b"), identity=Identity.generate())
    await node.start()
    try:
        (reachable,) = node.addresses
        unreachable = reachable.replace(reachable.split("/")[4], "9", 1)
        other = reachable.replace(node.peer_id, Identity.generate().peer_id)
        peers = tuple(map(parse_multiaddr, (unreachable, reachable, other)))
        probe = await probe_network(peers, listen=(LOOPBACK,), sockets_dir=tmp_path / "p")
    finally:
        await node.close()
    first, second, third = probe.addresses
    assert "connection refused" in first.error
    assert (second.error, second.is_in_directory) == ("", True)
    assert second.clock_skew_s is not None
    assert abs(second.clock_skew_s) < 1, "both clocks are this machine's"
    assert second.relay_limit is not None
    assert second.relay_limit.num_bytes == 1 << 32
    assert "peer id mismatch" in third.error
    assert probe.reachability is Reachability.LOCAL
