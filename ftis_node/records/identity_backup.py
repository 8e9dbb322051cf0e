"""Backup of an identity in one file: small enough to print, checked before it is used.

    {"what": "ftis-node identity", "format": 1, "peer_id": "12D3KooW...", "created_at": "2026-01-31T12:00:00Z",
     "seed": "<64 hex>"}                                                     plain
     "sealed": {"salt": "<32 hex>", "nonce": "<24 hex>", "text": "<96 hex>"}} or under a passphrase

`sealed` is the seed under AES-256-GCM, with the peer id as associated data. The key is scrypt(passphrase) with
parameters N = 2^15, r = 8, p = 1: 32 MiB and about 0.1 s for each guess (RFC 7914). The parameters belong to format 1
and are not read from the file, so a forged file cannot exhaust the memory. The key file of a home (`identity.key`, 64
hex characters) is accepted as a plain backup, too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from ftis_node.errors import ConfigError, UsageError
from ftis_node.records.identity import SEED_BYTES, Identity

if TYPE_CHECKING:
    from collections.abc import Callable

WHAT = "ftis-node identity"
FORMAT = 1
MAX_BYTES = 4096
SALT_BYTES = 16
NONCE_BYTES = 12
KEY_BYTES = 32
TAG_BYTES = 16
SCRYPT_N, SCRYPT_R, SCRYPT_P = 1 << 15, 8, 1


class EncryptedKey(msgspec.Struct, frozen=True):
    """The seed encrypted with a passphrase; all fields are hex."""

    salt: str
    nonce: str
    text: str


class IdentityBackup(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of the file. Exactly one of `seed` and `sealed` is set."""

    what: str
    format: int
    peer_id: str
    created_at: str
    seed: str = ""
    sealed: EncryptedKey | None = None


def pack_backup(identity: Identity, *, created_at: str, passphrase: str | None) -> bytes:
    """Return the file's bytes, encrypted if there is a passphrase."""
    seed, sealed = identity.seed.hex(), None
    if passphrase is not None:
        seed, sealed = "", _seal(identity, passphrase)
    backup = IdentityBackup(WHAT, FORMAT, identity.peer_id, created_at, seed, sealed)
    return msgspec.json.format(msgspec.json.encode(backup)) + b"\n"


def unpack_backup(data: bytes, *, name: str, ask_passphrase: Callable[[], str]) -> Identity:
    """Return the identity in a file's bytes. Errors contain `name`. Only an encrypted seed calls `ask_passphrase`.

    Raises ConfigError for a file that is no backup, is damaged or too new, UsageError for a wrong passphrase.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name} is no backup of an identity: it is larger than {MAX_BYTES} bytes")
    if (key := Identity.parse(data.decode("ascii", "replace"))) is not None:
        return key
    try:
        backup = msgspec.json.decode(data, type=IdentityBackup)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(f"{name} is no backup of an identity, or is cut off: give another") from None
    if backup.what != WHAT:
        raise ConfigError(f"{name} is no backup of an identity: give another")
    if backup.format != FORMAT:
        raise ConfigError(f"{name} was written by a newer ftis-node (format {backup.format}): update this one")
    seed = _unseal(backup, backup.sealed, name, ask_passphrase()) if backup.sealed else _hex(backup.seed, SEED_BYTES)
    identity = None if seed is None else Identity.from_seed(seed)
    if identity is None or identity.peer_id != backup.peer_id:
        raise ConfigError(f"{name} is damaged: its key is not that of the peer id it names; give another backup")
    return identity


def _seal(identity: Identity, passphrase: str) -> EncryptedKey:
    salt, nonce = os.urandom(SALT_BYTES), os.urandom(NONCE_BYTES)
    text = AESGCM(_key(passphrase, salt)).encrypt(nonce, identity.seed, identity.peer_id.encode())
    return EncryptedKey(salt.hex(), nonce.hex(), text.hex())


def _unseal(backup: IdentityBackup, sealed: EncryptedKey, name: str, passphrase: str) -> bytes | None:
    salt, nonce = _hex(sealed.salt, SALT_BYTES), _hex(sealed.nonce, NONCE_BYTES)
    text = _hex(sealed.text, SEED_BYTES + TAG_BYTES)
    if salt is None or nonce is None or text is None:
        return None
    try:
        return AESGCM(_key(passphrase, salt)).decrypt(nonce, text, backup.peer_id.encode())
    except InvalidTag:
        raise UsageError(f"the passphrase does not open {name}, or the file was changed: try again") from None


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=KEY_BYTES, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P).derive(passphrase.encode())


def _hex(text: str, num_bytes: int) -> bytes | None:
    """Return the bytes of `text` if it is hex digits for exactly `num_bytes` bytes, else None."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == num_bytes else None
