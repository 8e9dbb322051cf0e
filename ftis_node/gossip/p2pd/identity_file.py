"""The node's key in the form that p2pd reads: libp2p's `PrivateKey` protobuf, Ed25519, private and public half.

Key type 1 is Ed25519; its data are the 32-byte seed and the 32-byte public key.
Format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md#keys
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.records.identity import SEED_BYTES, write_private

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.records.identity import Identity

_HEADER = bytes((0x08, 0x01, 0x12, 0x40))  # field 1: key type 1; field 2: 64 bytes


def libp2p_private_key(identity: Identity) -> bytes:
    """The serialised `PrivateKey` of an identity, 68 bytes."""
    return _HEADER + identity.seed + identity.peer[-SEED_BYTES:]


def write_identity_file(identity: Identity, path: Path) -> None:
    """Writes the key for p2pd, readable by its owner alone; replaces what is there in one step."""
    write_private(path, libp2p_private_key(identity))
