"""Identity of a node: one Ed25519 key, whose public half is inside the peer id.

A libp2p peer id of an Ed25519 key is six fixed bytes and the 32 bytes of the public key. So any node that knows the id
can check a signature without a request. A signature covers a domain string and the bytes signed, so a signature for one
kind of record is not valid for another.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ftis_node.errors import ConfigError, DamagedError
from ftis_node.files import check_regular, read_file, replace_file

MAX_KEY_FILE_BYTES = 4096
ENVELOPE_DOMAIN = b"ftis-node/envelope/1\n"
PEER_DOMAIN = b"ftis-node/peer/1\n"
WEIGHTS_DOMAIN = b"ftis-node/weights/1\n"
SEED_BYTES = 32
PEER_ID_BYTES = 38
PEER_ID_CHARS = 52
SHOWN_CHARS = 80  # shown of an invalid id in an error message
NUM_CACHED_PEERS = 4096  # base58 costs as much as unpacking a group, and a node meets the same peers often
_ED25519_PEER_PREFIX = bytes.fromhex("002408011220")  # identity multihash of 36 bytes: key type 1, 32 bytes of key


def peer_id_bytes(public_key: bytes) -> bytes:
    """Return the raw 38-byte peer id of a 32-byte Ed25519 public key."""
    return _ED25519_PEER_PREFIX + public_key


def is_peer_id(raw: bytes) -> bool:
    return len(raw) == PEER_ID_BYTES and raw.startswith(_ED25519_PEER_PREFIX)


@lru_cache(maxsize=NUM_CACHED_PEERS)
def peer_id_text(raw: bytes) -> str:
    """Return the text form of a raw peer id (`12D3Koo...`). Raises ValueError if it is not an Ed25519 id."""
    if not is_peer_id(raw):
        raise ValueError(f"{len(raw)} bytes are not an Ed25519 peer id")
    return str(base58.b58encode(raw), "ascii")


def ed25519_peer_id(raw: bytes) -> str | None:
    """Return the text form of a raw peer id from the network; None if its key is of another type."""
    return peer_id_text(raw) if is_peer_id(raw) else None


@lru_cache(maxsize=NUM_CACHED_PEERS)
def peer_id_from_text(text: str) -> bytes:
    """Return the raw form of a peer id. Raises ValueError if it is not an Ed25519 id."""
    if len(text) != PEER_ID_CHARS or not text.isascii():  # before base58, whose cost grows with the square
        raise ValueError(f"{text[:SHOWN_CHARS]!r} is not an Ed25519 peer id")
    raw: bytes = base58.b58decode(text)
    if not is_peer_id(raw):
        raise ValueError(f"{text!r} is not an Ed25519 peer id")
    return raw


def verify(peer: bytes, domain: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether `peer` (a raw peer id) signed `message` in `domain`; false for malformed input."""
    if not is_peer_id(peer):
        return False
    try:
        _public_key(peer).verify(signature, domain + message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=NUM_CACHED_PEERS)
def _public_key(peer: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(peer[len(_ED25519_PEER_PREFIX) :])


@lru_cache(maxsize=1)
def _private_key(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed)


@dataclass(frozen=True, slots=True)
class Identity:
    seed: bytes = field(repr=False)
    peer: bytes

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
        return cls(seed=seed, peer=peer_id_bytes(public))

    @classmethod
    def generate(cls) -> Identity:
        return cls.from_seed(os.urandom(SEED_BYTES))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity in the file `path`; create the file if it is missing.

        The file holds the hex seed and the peer id, one on each line, with mode 0600. A file made by hand may have the
        seed alone. The peer id is added, so that a flipped bit is detected.
        Raises DamagedError, and ConfigError if other users can read the file.
        """
        check_regular(path)
        if not path.exists():
            cls.generate().save(path)
        identity = cls.load(path)
        if len(read_file(path, max_bytes=MAX_KEY_FILE_BYTES).split()) == 1:
            identity.save(path)
        return identity

    @classmethod
    def parse(cls, text: str) -> Identity | None:
        """Return the identity in a key file's text; None if it is invalid or seed and peer id do not match."""
        seed, *peer_id = text.split() or [""]
        try:
            identity = cls.from_seed(bytes.fromhex(seed)) if len(seed) == 2 * SEED_BYTES else None
        except ValueError:
            return None
        return identity if identity is not None and peer_id in ([], [identity.peer_id]) else None

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Return the identity in the file `path`. Raises ConfigError if it is missing, else as `load_or_create`."""
        try:
            text = read_file(path, max_bytes=MAX_KEY_FILE_BYTES).decode("ascii", errors="replace")
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"the identity file {path} can be read by others: run chmod 600 on it")
            identity = cls.parse(text)
        except FileNotFoundError:
            raise ConfigError(
                f"there is no identity {path} yet: `join` makes one, or copy the identity.key of another home there"
            ) from None
        except OSError as error:
            raise ConfigError(f"the identity file {path} cannot be read: {error.strerror}") from None
        if identity is None:
            raise DamagedError(
                f"the identity file {path} is damaged: put a copy of it back; without a copy delete the file, and the "
                "node becomes a new peer"
            )
        return identity

    def save(self, path: Path) -> None:
        """Write the file `path` atomically, readable by its owner only. Raises OSError."""
        replace_file(path, f"{self.seed.hex()}\n{self.peer_id}\n".encode(), mode=0o600)

    @property
    def peer_id(self) -> str:
        return peer_id_text(self.peer)

    def secret_number(self, purpose: bytes) -> int:
        """Return a number in [0, 2^62) that is the same at each call and cannot be computed without the key."""
        return int.from_bytes(hmac.digest(self.seed, purpose, "sha256")[:8]) >> 2

    def sign(self, domain: bytes, message: bytes) -> bytes:
        return _private_key(self.seed).sign(domain + message)
