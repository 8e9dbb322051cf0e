"""Addresses: all parsers agree, each accepted one has a binary form, and reachability follows from them."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.bootstrap.daemon import run_bootstrap_node
from ftis_node.config.home import Home
from ftis_node.errors import ConfigError
from ftis_node.gossip.dialer import Dialer
from ftis_node.gossip.directory.entries import unpack_addresses
from ftis_node.gossip.directory.storage import address_block, choose_evicted, sample_by_block
from ftis_node.gossip.multiaddr import (
    Reachability,
    check_announced_address,
    is_link_local,
    parse_listen_address,
    parse_multiaddr,
    reachability_of,
    usable_addresses,
)
from ftis_node.gossip.p2pd.client import P2pdError, _usable
from ftis_node.gossip.p2pd.hivemind_bindings import Multiaddr, address_bytes, address_texts
from ftis_node.gossip.p2pd.relay_limit import RESERVE, RelayLimit, read_reservation
from ftis_node.records.addresses import CODES, MAX_ADDRESS_CHARS, AddressError, parse_address, read_address
from ftis_node.swarm.rate_limits import subnet_of
from tests.gossip.helpers import PEER, RELAY
from tests.gossip.helpers import settings as network_settings

WORDS = st.one_of(
    st.sampled_from(
        [*CODES, "ip4", "tcp", "p2p", PEER, RELAY, "1.2.3.4", "::1", "fe80::1%eth0", "::ffff:1.2.3.4", "4001", "04001"]
    ),
    st.sampled_from(
        ["a_b", "_x", "a..b", "-a", "a-", "xn--bcher-kva", "bücher", "ⅷ.example", "unix", "ip6zone", "9" * 99]
    ),
    st.ip_addresses().map(str),
    st.integers(-1, 70_000).map(str),
    st.text(max_size=12),
    st.from_regex(r"[a-zA-Z0-9_.-]{1,70}", fullmatch=True),
)
ANY_TEXT = st.one_of(st.lists(WORDS, max_size=10).map(lambda words: "/" + "/".join(words)), st.text(max_size=60))
HOST = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).map(lambda ip: f"/ip6/{ip}"),
    st.tuples(
        st.sampled_from(["dns", "dns4", "dns6"]),
        st.from_regex(r"[a-z0-9_]{1,9}(\.[a-zA-Z0-9_-]{1,9}){0,3}", fullmatch=True),
    ).map(lambda pair: f"/{pair[0]}/{pair[1]}"),
)
PLAUSIBLE = st.tuples(
    HOST,
    st.sampled_from(["/tcp/{}", "/tcp/{}/ws", "/tcp/{}/wss", "/udp/{}/quic-v1", "/udp/{}"]),
    st.integers(0, 65_536),
    st.sampled_from(["", f"/p2p/{RELAY}/p2p-circuit", "/p2p-circuit"]),
    st.sampled_from(["", f"/p2p/{PEER}", f"/p2p/{PEER[:-1]}"]),
).map(lambda parts: parts[0] + parts[1].format(parts[2]) + parts[3] + parts[4])
TEXTS = st.one_of(PLAUSIBLE, ANY_TEXT)


def _accepted(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ConfigError as error:
        assert "\n" not in str(error), "an error has one line"
        assert len(str(error)) < 600
        return None


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_an_accepted_address_is_written_and_read_unchanged(text):
    try:
        address = parse_address(text)
    except AddressError:
        with pytest.raises(AddressError):
            address_bytes(text)
        return
    raw = address_bytes(text)
    assert read_address(raw) == address == parse_address(address.text)
    assert address_texts([raw]) == (address.text,)
    hivemind_reads = (
        "_" not in text
        and "p2p" not in address.names
        and not any(part.startswith("-") or part.endswith("-") for part in address.host.split("."))
    )
    if hivemind_reads:
        assert Multiaddr(address.text.lower()).to_bytes() == parse_address(address.text.lower()).to_bytes()


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_the_command_line_accepts_only_addresses_that_can_be_dialed(text):
    if (peer := _accepted(parse_multiaddr, text)) is not None:
        is_dialed = not is_link_local(parse_address(text))  # of the directory; the operator may name any
        assert usable_addresses(peer.peer_id, [text]) == [peer.transport] * is_dialed
        assert address_bytes(peer.transport)
        assert address_bytes(peer.text)
        assert "," not in peer.text
    if (listen := _accepted(parse_listen_address, text)) is not None:
        assert address_bytes(listen.text)
        assert listen.with_port(7) == parse_listen_address(listen.with_port(7).text)
    if _accepted(lambda text: check_announced_address(text) or text, text) is not None:
        assert address_bytes(text)
        assert usable_addresses(PEER, [f"{text}/p2p/{PEER}"])


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=512), st.lists(TEXTS, max_size=8).map(lambda texts: "\n".join(texts).encode())))
def test_addresses_of_a_directory_entry_are_dialed_or_omitted(payload):
    claimed = unpack_addresses(payload)
    address_block(claimed)
    subnet_of(claimed)
    known = usable_addresses(PEER, claimed)
    assert len(_usable(known)) == len(known)
    assert isinstance(address_block(known), str)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_bytes_of_a_peers_address_are_read_or_omitted(raw):
    for text in address_texts([raw]):
        assert parse_address(text) == read_address(raw)


@pytest.mark.parametrize(
    "text",
    [
        "/ip6/fe80::1%eth0/tcp/4001", "/ip6/::ffff:1.2.3.4/tcp/1", "/ip4/127.0.0.1/tcp/" + "0" * 5000,
        "/ip4/127.0.0.1/tcp/04001", "/ip4/127.0.0.1/tcp/٤", "/ip4/127.0.0.1/udp/1", "/ip4/127.0.0.1/tcp/1/quic-v1",
        "/ip4/127.0.0.1/tcp/1/tcp/2", "/dns4/" + "a" * 64 + "/tcp/1", "/dns4/" + ".".join(["a" * 60] * 5) + "/tcp/1",
        "/dns4/a..b/tcp/1", "/dns4/bücher.example/tcp/1", "/ip4/1.2.3.4/tcp/1" + f"/p2p/{RELAY}/p2p-circuit" * 2,
        "/ip4/1.2.3.4/tcp/1" + "/ws" * MAX_ADDRESS_CHARS,
    ],
)  # fmt: skip
def test_an_address_that_some_parsers_would_accept_is_refused_by_all(text):
    for parse in (parse_address, address_bytes):
        with pytest.raises(AddressError):
            parse(text)
    for parse_option in (parse_multiaddr, parse_listen_address, check_announced_address):
        with pytest.raises(ConfigError) as raised:
            parse_option(text)
        assert len(str(raised.value)) < 300
    assert usable_addresses(PEER, [f"{text}/p2p/{PEER}"]) == []


@pytest.mark.parametrize(
    "transport",
    [
        "/ip4/203.0.113.7/tcp/4001", "/ip6/2001:db8::1/tcp/4001", "/dns4/node.example.org/tcp/4001",
        "/ip4/203.0.113.7/udp/4001/quic-v1", f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}/p2p-circuit",
    ],
)  # fmt: skip
def test_an_address_is_a_transport_and_a_peer_id(transport):
    address = parse_multiaddr(f"{transport}/p2p/{PEER}")
    assert (address.peer_id, address.transport) == (PEER, transport)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("localhost:4001", "not a multiaddr"),
        (f"/ip4/1.2.3.4//tcp/1/p2p/{PEER}", "not a multiaddr"),
        ("/ip4/1.2.3.4/tcp/4001", "must end in /p2p/ID"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{RELAY}/p2p-circuit", "must end in /p2p/ID"),
        (f"/ip4/1.2.3.4/p2p/{PEER}", "no host and transport"),
        (f"/ip4/1.2.3.4/tcp/65536/p2p/{PEER}", "bad value '65536'"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER[:-1]}0", "bad value"),  # no 0 in base58
        (f"/unix/tmp/x/p2p/{PEER}", "unknown protocol 'unix'"),
        ("/ip4/1.2.3.4/tcp/4001/p2p", "bad value ''"),
    ],
)
def test_the_error_names_the_problem(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_multiaddr(text)


def test_listen_addresses_are_parsed():
    address = parse_listen_address("/ip4/0.0.0.0/tcp/0")
    assert (address.host, address.names[1], address.port) == ("0.0.0.0", "tcp", 0)
    assert address.with_port(4001) == parse_listen_address("/ip4/0.0.0.0/tcp/4001")
    assert parse_listen_address("/ip6/::/udp/4001/quic-v1").port == 4001


@pytest.mark.parametrize("name", ["ftis_boot", "_x.example", "my_host"])
def test_names_with_an_underscore_are_dialed(name):
    """Docker Compose creates such names. hivemind's parser refuses them, p2pd does not."""
    address = parse_multiaddr(f"/dns4/{name}/tcp/4001/p2p/{PEER}")
    assert address_bytes(address.transport) == b"\x36" + bytes([len(name)]) + name.encode() + b"\x06\x0f\xa1"
    assert usable_addresses(PEER, [address.text]) == [f"/dns4/{name}/tcp/4001"]
    with pytest.raises(ValueError, match="_"):
        str(Multiaddr(address_bytes(address.transport)))


class _Control:
    """A control client that accepts requests as p2pd does, and records the dials."""

    def __init__(self) -> None:
        self.dialed: list[tuple[str, int]] = []

    async def connect(self, peer_id: str, addresses: list[str], *, timeout_s: float) -> None:
        self.dialed.append((peer_id, len(_usable(addresses))))


def test_an_invalid_address_does_not_keep_others_from_being_dialed(tmp_path):
    session: Any = type("Session", (), {"client": _Control()})()
    dialer = Dialer(network_settings(tmp_path), rng=random.Random(1))
    errors = asyncio.run(dialer.dial(session, {PEER: ["/dns4/a..b/tcp/1", "/ip4/1.2.3.4/tcp/1"], RELAY: ["invalid"]}))
    assert (session.client.dialed, errors[0]) == ([(PEER, 1)], "")
    assert "not a multiaddr" in errors[1]
    with pytest.raises(P2pdError, match=r"invalid.*nonsense"):
        _usable(["invalid", "nonsense"])
    assert _usable([]) == []


@pytest.mark.parametrize("transport", ["/ip6/fe80::1%eth0/tcp/1", "/ip4/127.0.0.1/tcp/" + "0" * 5000])
def test_a_bootstrap_node_reports_an_address_that_cannot_be_used(tmp_path, transport):
    with pytest.raises(ConfigError, match="cannot be used") as raised:
        run_bootstrap_node(Home(tmp_path), listen=(), peers=(f"{transport}/p2p/{PEER}",), show=print)
    assert raised.value.exit_code == 2


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
        (["/ip4/192.168.1.7/tcp/1"], "192.168.1.0/24"), (["/ip6/2001:4860:4860:7::8888/tcp/1"], "2001:4860:4860::/48"),
        (["/ip4/192.168.1.7/tcp/1", CIRCUIT], "8.8.8.0/24"), (["/dns4/node.example.org/tcp/1"], "node.example.org"),
        (["invalid"], ""),
    ],
)  # fmt: skip
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
