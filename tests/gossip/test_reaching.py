"""Connecting, without a network: reachability, binary addresses, relay limits, Sybil limits."""

import random

import pytest

from ftis_node.gossip.directory.validators import address_block, choose_evicted, sample_by_block
from ftis_node.gossip.multiaddr import Reachability, reachability_of
from ftis_node.gossip.p2pd.hivemind_bindings import address_bytes, address_texts
from ftis_node.gossip.p2pd.relay_limit import RESERVE, RelayLimit, read_reservation
from tests.gossip.test_multiaddr import PEER, RELAY

CIRCUIT = f"/ip4/8.8.8.8/tcp/4001/p2p/{RELAY}/p2p-circuit"


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ([], Reachability.UNKNOWN),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip6/fe80::1/tcp/1"], Reachability.LOCAL),
        (["/ip4/100.64.0.1/tcp/1"], Reachability.LOCAL),  # behind a provider's NAT
        (["/ip4/192.168.1.2/tcp/1", "/ip4/8.8.8.8/tcp/1"], Reachability.PUBLIC),
        (["/dns4/node.example.org/tcp/1"], Reachability.PUBLIC),
        (["/ip4/8.8.8.8/tcp/1", CIRCUIT], Reachability.RELAYED),
        (["/memory/loopback", ""], Reachability.LOCAL),
    ],
)
def test_the_reachability_follows_from_the_addresses(addresses, expected):
    assert reachability_of(addresses) is expected


def test_a_peer_id_inside_an_address_is_written_for_p2pd():
    """The peer id has 38 bytes. p2pd refuses content ids, so a relayed address with one could not be dialed."""
    raw = address_bytes(CIRCUIT)
    assert raw[:8] == bytes([4, 8, 8, 8, 8, 6, 4001 >> 8, 4001 & 255])
    assert raw[8:17].hex() == "a50326002408011220"
    assert (len(raw), raw[-2:].hex()) == (8 + 3 + 38 + 2, "a202")
    assert address_texts([raw, address_bytes(f"{CIRCUIT}/p2p/{PEER}")]) == (CIRCUIT, f"{CIRCUIT}/p2p/{PEER}")


def test_the_limits_of_a_relay_are_read():
    assert RESERVE == b"\x08\x00"
    reservation = b"\x1a\x02\x08\x01"
    assert read_reservation(b"\x08\x02" + reservation + b"\x22\x06\x08\x78\x10\x80\x80\x08\x28\x64") == RelayLimit(
        131072, 120
    )
    assert read_reservation(b"\x08\x02\x28\x64") == RelayLimit(0, 0), "no limit"
    assert read_reservation(b"\x08\x02\x28\xc8\x01") is None, "refused"
    assert read_reservation(b"\x28\x64\x20\x01") == RelayLimit(0, 0), "a limit of another type is an unknown field"


@pytest.mark.parametrize("answer", [b"\x08", b"\x22\x05a", b"\xff" * 20, b"\x0b"])
def test_an_invalid_answer_of_a_relay_is_a_value_error(answer):
    with pytest.raises(ValueError, match=r"."):
        read_reservation(answer)


@pytest.mark.parametrize(
    ("addresses", "block"),
    [
        (["/ip4/192.168.1.7/tcp/1", "/ip4/8.8.4.4/tcp/1", "/ip4/9.9.9.9/tcp/1"], "8.8.4.0/24"),
        (["/ip4/192.168.1.7/tcp/1"], "192.168.1.0/24"),
        (["/ip6/2001:4860:4860:7::8888/tcp/1"], "2001:4860:4860::/48"),
        (["/ip4/192.168.1.7/tcp/1", CIRCUIT], "8.8.8.0/24"),
        (["/dns4/node.example.org/tcp/1"], "node.example.org"),
        (["invalid"], ""),
    ],
)
def test_the_address_block_of_a_peer(addresses, block):
    assert address_block(addresses) == block


def test_the_newest_members_of_the_largest_block_are_evicted():
    blocks = {"old": "a", "first": "b", "second": "b", "third": "b", "other": "c"}
    assert choose_evicted(blocks, room=5) == []
    assert choose_evicted(blocks, room=3) == ["third", "second"]
    assert choose_evicted(blocks, room=1) == ["third", "second", "other", "first"]


def test_a_few_random_peers_of_each_block_are_dialed():
    known = {f"crowd {number}": ["/ip4/9.9.9.9/tcp/1"] for number in range(1000)} | {"alone": ["/ip4/8.8.8.8/tcp/1"]}
    draws = [sample_by_block(known, per_block=3, rng=random.Random(seed)) for seed in range(5)]
    assert all(len(draw) == 4 and "alone" in draw for draw in draws)
    assert len({name for draw in draws for name in draw}) > 10
