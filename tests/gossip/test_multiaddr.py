"""Addresses from the command line."""

import subprocess
import sys

import pytest

from ftis_node.errors import ConfigError
from ftis_node.gossip import parse_listen_address, parse_multiaddr

PEER = "12D3KooWFLAyEDfpb3cDnXBP7JfUnuKAgz7tPeRwEUSmSunbS8dP"
RELAY = "12D3KooWGRUfLhVGzT4EzGEPx1yKPS2SsiAc6Lup4FvPuQxVmAUV"


@pytest.mark.parametrize(
    "transport",
    [
        "/ip4/203.0.113.7/tcp/4001",
        "/ip6/2001:db8::1/tcp/4001",
        "/dns4/node.example.org/tcp/4001",
        "/ip4/203.0.113.7/udp/4001/quic-v1",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}/p2p-circuit",
    ],
)
def test_an_address_is_a_transport_and_a_peer_id(transport):
    address = parse_multiaddr(f"{transport}/p2p/{PEER}")
    assert (address.peer_id, address.transport) == (PEER, transport)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a multiaddr"),
        ("localhost:4001", "not a multiaddr"),
        (f"/ip4/1.2.3.4//tcp/1/p2p/{PEER}", "not a multiaddr"),
        ("/ip4/1.2.3.4/tcp/4001", "must end in /p2p/ID"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{RELAY}/p2p-circuit", "must end in /p2p/ID"),
        (f"/p2p/{PEER}", "no host and transport"),
        (f"/ip4/1.2.3.4/p2p/{PEER}", "no host and transport"),
        (f"/ip4/1.2.3.400/tcp/4001/p2p/{PEER}", "bad value '1.2.3.400'"),
        (f"/ip4/::1/tcp/4001/p2p/{PEER}", "bad value '::1'"),
        (f"/ip4/1.2.3.4/tcp/65536/p2p/{PEER}", "bad value '65536'"),
        (f"/ip4/1.2.3.4/tcp/-1/p2p/{PEER}", "bad value '-1'"),
        (f"/dns4/a b/tcp/1/p2p/{PEER}", "bad value 'a b'"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER[:-1]}", "bad value"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER[:-1]}0", "bad value"),  # no 0 in base58
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER},/ip4/1.2.3.4", "bad value"),
        (f"/unix/tmp/x/p2p/{PEER}", "unknown protocol 'unix'"),
        ("/ip4/1.2.3.4/tcp/4001/p2p", "bad value ''"),
    ],
)
def test_the_error_names_the_problem(text, problem):
    with pytest.raises(ConfigError) as raised:
        parse_multiaddr(text)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_listen_addresses_are_parsed():
    address = parse_listen_address("/ip4/0.0.0.0/tcp/0")
    assert (address.host, address.transport, address.port) == ("0.0.0.0", "tcp", 0)
    assert address.with_port(4001) == parse_listen_address("/ip4/0.0.0.0/tcp/4001")
    assert parse_listen_address("/ip6/::/udp/4001/quic-v1").port == 4001


def test_the_package_imports_no_large_library():
    code = (
        "import sys, ftis_node.gossip as g; sys.exit(str(sorted({'hivemind', 'torch', 'google'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"
