"""Backup and restore of a home's identity while no node runs.

A node numbers its groups, and its peers accept each number once. A home on a new disk or machine does not know the last
number of a restored identity. Then numbers continue at the present Unix time in seconds. That is above any used number,
because no node generates a group per second for years.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.errors import ConfigError, FileError, UsageError
from ftis_node.files import read_file
from ftis_node.node.startup.migrations import opened
from ftis_node.records.identity import Identity, write_private
from ftis_node.records.identity_backup import MAX_BYTES, pack_backup, unpack_backup
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftis_node.config.home import Home

KEPT_NAME = "%Y%m%dT%H%M%SZ"


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
        raise UsageError(f"{out} is there already: choose another name, or overwrite it with --force")
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        write_private(out, pack_backup(identity, created_at=created_at, passphrase=passphrase))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; choose another place") from None
    return identity.peer_id


def restore_identity(home: Home, source: Path, *, ask_passphrase: Callable[[], str], replace: bool) -> RestoredIdentity:
    """Restore the identity of a backup into a home without a running node; keep a previous key under another name.

    Raise UsageError and ConfigError: no readable backup, wrong passphrase, another identity in the home (unless
    `replace`); HomeInUseError if a node runs.
    """
    identity = unpack_backup(_read(source), name=str(source), ask_passphrase=ask_passphrase)
    with opened(home):
        present = _present(home.identity)
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


def _read(source: Path) -> bytes:
    try:
        return read_file(source, max_bytes=MAX_BYTES)
    except FileError as error:
        raise UsageError(f"{error}; name the backup's file") from None
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}; name the backup's file") from None


def _present(path: Path) -> Identity | None:
    """Return the present identity; None if it is missing or invalid."""
    try:
        return Identity.load(path)
    except ConfigError:
        return None


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
        reader = ReplayReader(replay)
        try:
            if reader.has_own_of(identity.peer_id):
                return
        finally:
            reader.close()
    buffer = ReplayBuffer(replay)
    try:
        buffer.raise_last_number(int(time.time()))
    finally:
        buffer.close()
