"""Directory entries that only their owner can write.

The DHT itself lets any peer overwrite any key and set any expiry. Therefore each entry carries its owner's peer id, its
expiry and a signature. Every node that stores or reads an entry verifies it, and checks that it is under its owner's
key:

    entry = kind (1) + peer id (38) + expiry (8, Unix time as float64) + signature (64)
            + length of the run id (1) + run id + payload

A `RECORD` has a separate key. A run's `MANIFEST` is under the run's key; the run id is the beginning of its hash, so
any node may provide it. A `MEMBER` is in one of the run's buckets, with the peer id as subkey. No bucket grows beyond
the size of a reply. A node that stores entries, such as a bootstrap node, need not know the run.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES
from ftis_node.gossip.names import RUN_ID, bucket_key, manifest_key, record_key
from ftis_node.records.identity import Identity, peer_id_text, verify
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS, bucket_of

DIRECTORY_DOMAIN = b"ftis-node/directory/1\n"
MAX_MEMBER_BYTES = 512
MAX_ADDRESSES = 6  # of a member; with /p2p/ID no more fit
MAX_SIGNATURES_REMEMBERED = 2048  # of at most 2.3 KB each
CLOCK_SLACK_S = 60.0
SHARDS_MARK = "shards="
_HEAD = struct.Struct(">B38sd64sB")
MAX_MANIFEST_BYTES = 1 << 16
RUN_ID_HEX = 32


def is_of_another(expires_at: float, *, own: Collection[float]) -> bool:
    """Return whether another node under this identity created the entry that expires at `expires_at`.

    `own` are the expiries of this process's newest entries. Those of an earlier process are before all of them.
    """
    return bool(own) and expires_at > min(own) and expires_at not in own


def pack_manifest(canonical: bytes) -> bytes:
    return zlib.compress(canonical, level=9)


def unpack_manifest(payload: bytes, *, run_id: str) -> bytes | None:
    """Return the canonical text, of bounded size; None if the payload is not this run's manifest."""
    inflater = zlib.decompressobj()
    try:
        canonical = inflater.decompress(payload, MAX_MANIFEST_BYTES)
    except zlib.error:
        return None
    is_whole = inflater.eof and not inflater.unused_data
    return canonical if is_whole and hashlib.sha256(canonical).hexdigest()[:RUN_ID_HEX] == run_id else None


class EntryKind(IntEnum):
    RECORD = 1
    MEMBER = 2
    MANIFEST = 3


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """An entry, verified or this node's own. `expires_at` is Unix time in seconds."""

    kind: EntryKind
    run_id: str
    peer_id: str
    expires_at: float
    payload: bytes

    @property
    def key(self) -> str:
        if self.kind is EntryKind.RECORD:
            return record_key(self.run_id, self.peer_id)
        if self.kind is EntryKind.MANIFEST:
            return manifest_key(self.run_id)
        return bucket_key(self.run_id, bucket_of(self.peer_id))

    @property
    def subkey(self) -> str | None:
        return self.peer_id if self.kind is EntryKind.MEMBER else None


def sign_entry(identity: Identity, kind: EntryKind, run_id: str, payload: bytes, *, expires_at: float) -> bytes:
    signature = identity.sign(DIRECTORY_DOMAIN, _signed(kind, run_id, payload, expires_at))
    run = run_id.encode()
    return _HEAD.pack(kind, identity.peer, expires_at, signature, len(run)) + run + payload


def unverified(raw: bytes) -> tuple[str, bytes] | None:
    """Return the run and the payload of an entry whose signature was not verified; None if it is malformed."""
    if len(raw) < _HEAD.size:
        return None
    end = _HEAD.size + raw[_HEAD.size - 1]
    run = raw[_HEAD.size : end]
    if not run.isascii() or RUN_ID.fullmatch(run.decode("ascii")) is None:
        return None
    return run.decode("ascii"), raw[end:]


def verify_entry(raw: bytes, *, max_record_bytes: int) -> DirectoryEntry | None:
    """Return the entry in `raw`; None if it is malformed, too large or not signed by the named peer."""
    if (parts := unverified(raw)) is None:
        return None
    run_id, payload = parts
    code, peer, expires_at, signature, _ = _HEAD.unpack_from(raw)
    if code not in tuple(EntryKind):
        return None
    kind = EntryKind(code)
    if len(payload) > (MAX_MEMBER_BYTES if kind is EntryKind.MEMBER else max_record_bytes):
        return None
    if not _is_signed(peer, _signed(kind, run_id, payload, expires_at), signature):
        return None
    return DirectoryEntry(kind=kind, run_id=run_id, peer_id=peer_id_text(peer), expires_at=expires_at, payload=payload)


@functools.lru_cache(MAX_SIGNATURES_REMEMBERED)
def _is_signed(peer: bytes, signed: bytes, signature: bytes) -> bool:
    """Return whether the signature is valid. Several nodes return the same entry to each look-up."""
    return verify(peer, DIRECTORY_DOMAIN, signed, signature)


def has_valid_expiry(entry: DirectoryEntry, *, expires_at: float, now: float, max_ttl_s: float) -> bool:
    """Return whether the DHT's expiry equals the signed one and is at most `max_ttl_s` (plus slack) ahead."""
    return entry.expires_at == expires_at <= now + max_ttl_s + CLOCK_SLACK_S


def pack_member(addresses: list[str], *, num_shards: int) -> bytes:
    """Return a member's payload: the number of shards of its run, and as many addresses as fit, in the given order."""
    max_bytes = MAX_MEMBER_BYTES - MAX_OVERHEAD_BYTES  # for the encryption of the addresses
    packed = f"{SHARDS_MARK}{num_shards}\n".encode()
    for address in addresses[:MAX_ADDRESSES]:
        line = address.encode() + b"\n"
        if len(packed) + len(line) > max_bytes:
            break
        packed += line
    return packed


def split_private(kind: EntryKind, payload: bytes) -> tuple[bytes, bytes]:
    """Split a payload into the plain part for bootstrap nodes (a member's first line) and the part to encrypt."""
    end = payload.find(b"\n") + 1 if kind is EntryKind.MEMBER else 0
    return payload[:end], payload[end:]


def unpack_addresses(payload: bytes) -> list[str]:
    """Return the first `MAX_ADDRESSES` addresses in a member entry, unvalidated."""
    lines = payload.decode("ascii", errors="replace").split()
    return [line for line in lines if not line.startswith(SHARDS_MARK)][:MAX_ADDRESSES]


def num_shards_of(payload: bytes) -> int:
    """Return the number of shards that a member claims for its run; 1 if there is no valid number."""
    first, _, _ = payload.partition(b"\n")
    text = first.decode("ascii", errors="replace").removeprefix(SHARDS_MARK)
    return int(text) if text.isdecimal() and len(text) <= 2 and 1 <= int(text) <= NUM_MEMBER_BUCKETS else 1


def _signed(kind: EntryKind, run_id: str, payload: bytes, expires_at: float) -> bytes:
    """Return the exact bytes that are signed; the run id cannot contain the line break that ends it."""
    return struct.pack(">Bd", kind, expires_at) + run_id.encode() + b"\n" + payload
