"""Backup and restore of a home's identity while no node runs.

A node numbers its groups, and its peers accept each number once. A home on a new disk or machine does not know the last
number of a restored identity. Then numbers continue at the present Unix time in seconds. That is above any used number,
because no node generates a group per second for years.

The backup is one file, small enough to print, checked before it is used:

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
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from ftis_node.errors import ConfigError, FileError, UsageError
from ftis_node.files import read_file, replace_file
from ftis_node.node.startup.recovery import opened
from ftis_node.records.identity import SEED_BYTES, Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftis_node.config.home import Home

KEPT_NAME = "%Y%m%dT%H%M%SZ"
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


@dataclass(frozen=True, slots=True)
class RestoredIdentity:
    """Result of `restore_identity`. `kept` is the new path of the previous key, None if there was no other key."""

    peer_id: str
    changed: bool
    kept: Path | None


def back_up_identity(home: Home, out: Path, *, passphrase: str | None, replace: bool) -> str:
    """Write the home's identity to the file `out` (0600) and return its peer id.

    Raise ConfigError if there is no valid identity, UsageError if `out` exists (unless `replace`) or cannot be
    written.
    """
    identity = Identity.load(home.identity)
    if out.exists() and not replace:
        raise UsageError(f"{out} exists: choose another name, or overwrite it with --force")
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        replace_file(out, pack_backup(identity, created_at=created_at, passphrase=passphrase), mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; choose another place") from None
    return identity.peer_id


def restore_identity(home: Home, source: Path, *, ask_passphrase: Callable[[], str], replace: bool) -> RestoredIdentity:
    """Restore the identity of a backup into a home without a running node; keep a previous key under another name.

    Raise UsageError and ConfigError: no readable backup, wrong passphrase, another identity in the home (unless
    `replace`); HomeInUseError if a node runs.
    """
    try:
        data = read_file(source, max_bytes=MAX_BYTES)
    except FileError as error:
        raise UsageError(f"{error}; name the backup's file") from None
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}; name the backup's file") from None
    identity = unpack_backup(data, name=str(source), ask_passphrase=ask_passphrase)
    with opened(home):
        try:
            present = Identity.load(home.identity)
        except ConfigError:  # missing or invalid
            present = None
        if present == identity:
            return RestoredIdentity(identity.peer_id, changed=False, kept=None)
        if present is not None and not replace:
            raise ConfigError(
                f"{home.root} has another identity ({present.peer_id}): give another --home, or --force to replace it; "
                "the old key is kept beside it"
            )
        kept = _keep(home.identity)
        _go_on_numbering(home.replay, identity)
        identity.save(home.identity)
    return RestoredIdentity(identity.peer_id, changed=True, kept=kept)


def _keep(path: Path) -> Path | None:
    """Hard-link the present key to a second name, so that the home has a key at any time."""
    if not path.exists():
        return None
    kept = path.with_name(f"{path.name}.{time.strftime(KEPT_NAME, time.gmtime())}")
    kept.unlink(missing_ok=True)
    kept.hardlink_to(path)
    return kept


def _go_on_numbering(replay: Path, identity: Identity) -> None:
    """Set the next group's number above any that this identity has used."""
    if replay.exists():
        with closing(ReplayReader(replay)) as reader:
            if reader.has_own_of(identity.peer_id):
                return
    with closing(ReplayBuffer(replay)) as buffer:
        buffer.raise_last_number(int(time.time()))


def pack_backup(identity: Identity, *, created_at: str, passphrase: str | None) -> bytes:
    """Return the file's bytes, encrypted if there is a passphrase."""
    seed, sealed = identity.seed.hex(), None
    if passphrase is not None:
        seed, sealed = "", _seal(identity, passphrase)
    backup = IdentityBackup(WHAT, FORMAT, identity.peer_id, created_at, seed, sealed)
    return msgspec.json.format(msgspec.json.encode(backup)) + b"\n"


def unpack_backup(data: bytes, *, name: str, ask_passphrase: Callable[[], str]) -> Identity:
    """Return the identity in a file's bytes. Errors contain `name`. Only an encrypted seed calls `ask_passphrase`.

    Raises ConfigError for a file that is not a backup, is damaged or too new, UsageError for a wrong passphrase.
    """
    if (key := Identity.parse(data.decode("ascii", "replace"))) is not None:
        return key
    try:
        backup = msgspec.json.decode(data, type=IdentityBackup)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(f"{name} is not a backup of an identity, or is cut off: give another") from None
    if backup.what != WHAT:
        raise ConfigError(f"{name} is not a backup of an identity: give another")
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
        raise UsageError(f"{name} cannot be decrypted: the passphrase is wrong, or the file was changed") from None


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=KEY_BYTES, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P).derive(passphrase.encode())


def _hex(text: str, num_bytes: int) -> bytes | None:
    """Return the bytes of `text` if it is hex digits for exactly `num_bytes` bytes, else None."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == num_bytes else None
