"""Directory entries -> verification -> claimed addresses -> peers to dial -> bytes for p2pd."""

import random
from collections.abc import Sequence

from ftis_node.gossip import GossipLimits
from ftis_node.gossip.directory import entries
from ftis_node.gossip.directory.storage import address_block, choose_evicted, sample_by_block
from ftis_node.gossip.multiaddr import reachability_of, usable_addresses
from ftis_node.gossip.p2pd.hivemind_bindings import address_bytes, address_texts
from ftis_node.swarm.rate_limits import subnet_of
from ftis_node.swarm.topology import choose_dials, shard_of
from tests.fuzz.fuzzed_node import HOSTILE, RUN
from tests.fuzz.mutator import Item, join

MEMBER_BITS = 0x03
AS_IS = 0x80  # raw bytes instead of a payload to sign
BINARY = 0x40  # a binary address, as p2pd returns it
EXPIRES_AT = 1e9
LIMITS = GossipLimits()


def kinds(tag: int) -> None:
    """No item is a protobuf message."""


async def chain(items: Sequence[Item]) -> None:
    known: dict[str, list[str]] = {}
    for item in items:
        if item.tag & BINARY:
            _check_round_trip(item.data)
            continue
        raw = item.data if item.tag & AS_IS else _sealed(item)
        if (parts := entries.unverified(raw)) is not None:
            assert 1 <= entries.num_shards_of(parts[1]) <= 64
            entries.unpack_addresses(parts[1])
        entry = entries.verify_entry(raw, max_record_bytes=LIMITS.max_record_bytes)
        if entry is None:
            continue
        assert entry.key and entry.subkey != ""
        entries.has_valid_expiry(entry, expires_at=entry.expires_at, now=EXPIRES_AT, max_ttl_s=LIMITS.max_record_ttl_s)
        known[entry.peer_id] = usable_addresses(entry.peer_id, entries.unpack_addresses(entry.payload))
    _dial(known)


def _sealed(item: Item) -> bytes:
    kind = list(entries.EntryKind)[(item.tag >> 2 & 3) % 3]
    identity = HOSTILE[(item.tag & MEMBER_BITS) % len(HOSTILE)]
    return entries.sign_entry(identity, kind, RUN.run_id, item.data, expires_at=EXPIRES_AT)


def _check_round_trip(raw: bytes) -> None:
    """Check that the text of an address encodes and decodes to the same text."""
    for text in address_texts([raw]):
        assert address_texts([address_bytes(text)]) == (text,)
        address_block([text]), subnet_of([text]), reachability_of([text])


def _dial(known: dict[str, list[str]]) -> None:
    rng = random.Random(0)
    chosen = choose_dials(
        sample_by_block(known, per_block=2, rng=rng), [], members=[], num_target=8, rng=rng, read=(0, 1), num_shards=2
    )
    for peer_id in chosen:
        shard_of(peer_id, 2)
        for address in known[peer_id]:
            _check_round_trip(address_bytes(address))
            address_bytes(f"{address}/p2p/{peer_id}")
    choose_evicted({peer_id: address_block(addresses) for peer_id, addresses in known.items()}, room=1)


def seeds() -> list[bytes]:
    """Return addresses of all kinds of hosts and transports, of a relay, and invalid ones."""
    ids = [one.peer_id for one in HOSTILE]
    addresses = [
        *("/ip4/1.2.3.4/tcp/4001", "/ip6/2001:db8::1/udp/4001/quic-v1", "/dns4/a.example/tcp/1/ws", "/dns/a_b/tcp/1"),
        *(f"/ip4/1.2.3.4/tcp/1/p2p/{ids[1]}/p2p-circuit", "/ip6/fe80::1%eth0/tcp/1", "/ip6/::ffff:1.2.3.4/tcp/1"),
    ]
    lines = [[f"{address}/p2p/{ids[at]}" for address in addresses] for at in range(3)]
    payloads = [("shards=2\n" + "\n".join(some)).encode() for some in (lines[0][:3], lines[0][3:5], lines[0][5:])]
    sealed = entries.sign_entry(HOSTILE[0], entries.EntryKind.MEMBER, RUN.run_id, payloads[0], expires_at=EXPIRES_AT)
    binary = [address_bytes(address) for address in addresses[:3]]
    return [
        *(join([Item(4, payload)]) for payload in payloads),
        join([Item(AS_IS, sealed), Item(5, lines[1][0].encode()), Item(0, b"x"), Item(8, b"name = 1")]),
        join([Item(BINARY, one) for one in binary]),
    ]
