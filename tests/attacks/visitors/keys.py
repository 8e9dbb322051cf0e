"""Private keys of every kind that libp2p knows, in the form of p2pd's `-id` file.

A peer id of an Ed25519 or secp256k1 key holds the key itself; one of an RSA or ECDSA key is a hash.
Format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md#keys
"""

from __future__ import annotations

from enum import StrEnum

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


class KeyKind(StrEnum):
    """What a libp2p host may be identified by."""

    RSA = "rsa"
    ED25519 = "ed25519"
    SECP256K1 = "secp256k1"
    ECDSA = "ecdsa"


FOREIGN = (KeyKind.RSA, KeyKind.SECP256K1, KeyKind.ECDSA)  # all but the one that nodes have
_CODES = {KeyKind.RSA: 0, KeyKind.ED25519: 1, KeyKind.SECP256K1: 2, KeyKind.ECDSA: 3}


def private_key(kind: KeyKind) -> bytes:
    """A new key, as libp2p's `PrivateKey` protobuf."""
    data = _key_data(kind)
    return bytes((0x08, _CODES[kind], 0x12)) + _varint(len(data)) + data


def _key_data(kind: KeyKind) -> bytes:
    if kind is KeyKind.ED25519:
        key = ed25519.Ed25519PrivateKey.generate()
        return key.private_bytes_raw() + key.public_key().public_bytes_raw()
    if kind is KeyKind.SECP256K1:
        return ec.generate_private_key(ec.SECP256K1()).private_numbers().private_value.to_bytes(32, "big")
    made = rsa.generate_private_key(65537, 2048) if kind is KeyKind.RSA else ec.generate_private_key(ec.SECP256R1())
    return made.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80, value >> 7])
