"""Payload encryption for a swarm with a shared secret: outsiders can read neither its messages nor its names.

Two keys are derived from the secret and the run id (HKDF-SHA256). One makes the name that replaces the run id on the
wire, so that nodes with another secret or none never find this run. The other encrypts announcements, requests, items
and directory payloads with ChaCha20-Poly1305:

    encrypted = nonce (12, random) + ciphertext + tag (16)

Each ciphertext is bound to a context: its kind, sender and receiver, and for an item also the request that it answers.
Decryption in any other context fails. A run without a secret uses `NO_CIPHER`, which changes nothing.
"""

from __future__ import annotations

import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ftis_node.errors import RecordError

KEY_BYTES = 32
NAME_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
MAX_OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES
DOMAIN = b"ftis-node/secret/1"


class NullCipher:
    """Null object for a run without a secret."""

    overhead_bytes = 0  # that `encrypt` adds

    def wire_name(self, run_id: str) -> str:
        """Return the name of a run in topics, protocols and directory keys."""
        return run_id

    def encrypt(self, payload: bytes, *context: str | bytes) -> bytes:
        return payload

    def decrypt(self, ciphertext: bytes, *context: str | bytes) -> bytes:
        """Return the payload. Raises RecordError (`sealed`) for another secret or another context."""
        return ciphertext


NO_CIPHER = NullCipher()


class SecretCipher(NullCipher):
    overhead_bytes = MAX_OVERHEAD_BYTES

    def __init__(self, secret: bytes, *, run_id: str) -> None:
        derive = HKDF(algorithm=SHA256(), length=KEY_BYTES + NAME_BYTES, salt=run_id.encode(), info=DOMAIN)
        derived = derive.derive(secret)
        self._aead = ChaCha20Poly1305(derived[:KEY_BYTES])
        self._name = derived[KEY_BYTES:].hex()

    def wire_name(self, run_id: str) -> str:
        return self._name

    def encrypt(self, payload: bytes, *context: str | bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, payload, _packed(context))

    def decrypt(self, ciphertext: bytes, *context: str | bytes) -> bytes:
        if len(ciphertext) < MAX_OVERHEAD_BYTES:
            raise RecordError("sealed", f"{len(ciphertext)} bytes are too short for a ciphertext")
        try:
            return self._aead.decrypt(ciphertext[:NONCE_BYTES], ciphertext[NONCE_BYTES:], _packed(context))
        except InvalidTag:
            raise RecordError("sealed", "not encrypted with this run's secret for this context") from None


def _packed(context: tuple[str | bytes, ...]) -> bytes:
    """Return the concatenated hashes of the context's parts, so that different contexts have different bytes."""
    parts = (part.encode() if isinstance(part, str) else part for part in context)
    return b"".join(hashlib.sha256(part).digest() for part in parts)
