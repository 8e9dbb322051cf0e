"""Who a node is: one Ed25519 key, whose public half is inside the peer id.

A libp2p peer id of an Ed25519 key is the identity multihash of the protobuf-wrapped public key: six fixed bytes and the
32 bytes of the key. So anyone who knows the id can check a signature without asking anybody. Signatures cover a domain
string and the exact bytes signed; a signature made for one kind of record never passes for another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

ENVELOPE_DOMAIN = b"ftis-node/envelope/1\n"
PEER_DOMAIN = b"ftis-node/peer/1\n"
SEED_BYTES = 32
PEER_ID_BYTES = 38
_ED25519_PEER_PREFIX = bytes.fromhex("002408011220")  # identity multihash of 36 bytes: key type 1, 32 bytes of key


def peer_id_bytes(public_key: bytes) -> bytes:
    """The raw 38-byte peer id of a 32-byte Ed25519 public key."""
    return _ED25519_PEER_PREFIX + public_key


def peer_id_text(raw: bytes) -> str:
    """The usual text form of a raw peer id (`12D3Koo...`)."""
    return str(base58.b58encode(raw), "ascii")


def peer_id_from_text(text: str) -> bytes:
    """The raw form of a peer id. Raises ValueError for anything but an Ed25519 peer id."""
    raw: bytes = base58.b58decode(text)
    if len(raw) != PEER_ID_BYTES or not raw.startswith(_ED25519_PEER_PREFIX):
        raise ValueError(f"{text!r} is no Ed25519 peer id")
    return raw


def verify(peer: bytes, domain: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is `peer`'s (a raw peer id) over `message` in `domain`. False for any malformed input."""
    if len(peer) != PEER_ID_BYTES or not peer.startswith(_ED25519_PEER_PREFIX):
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(peer[len(_ED25519_PEER_PREFIX) :])
        key.verify(signature, domain + message)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's private key and what follows from it."""

    seed: bytes
    peer: bytes

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of a 32-byte private seed."""
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
        return cls(seed=seed, peer=peer_id_bytes(public))

    @classmethod
    def generate(cls) -> Identity:
        """A new identity from the system's random source."""
        return cls.from_seed(os.urandom(SEED_BYTES))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in the file `path` (hex seed, mode 0600), made there at first use.

        Raises ConfigError where the file is damaged or readable by others.
        """
        if not path.exists():
            identity = cls.generate()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(identity.seed.hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
            return identity
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"the identity file {path} can be read by others: run chmod 600 on it")
        try:
            seed = bytes.fromhex(path.read_text().strip())
        except ValueError:
            seed = b""
        if len(seed) != SEED_BYTES:
            raise ConfigError(f"the identity file {path} is damaged: restore it, or delete it to become a new peer")
        return cls.from_seed(seed)

    @property
    def peer_id(self) -> str:
        """The text form of the peer id."""
        return peer_id_text(self.peer)

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """The 64-byte signature over `domain` + `message`."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(domain + message)
