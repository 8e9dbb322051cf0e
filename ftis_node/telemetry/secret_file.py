"""Secrets that the operator puts into files."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from ftis_node.errors import ConfigError
from ftis_node.files import read_file
from ftis_node.telemetry.secrets import keep_secret

if TYPE_CHECKING:
    from pathlib import Path

MAX_SECRET_FILE_BYTES = 4096
MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096


def read_secret(path: Path, *, name: str) -> bytes:
    """Return the secret in the file of the setting `name`: raw bytes or hex digits.

    Raises ConfigError if the file is missing, short or not private.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        content = read_file(path, max_bytes=MAX_SECRET_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}; make one: openssl rand -hex 32") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{name} {path} is open to other users (mode {mode:03o}): chmod 600 {path}")
    secret = _unhexed(content)
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{name} {path} holds {len(secret)} bytes; {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} are needed:"
            " openssl rand -hex 32"
        )
    keep_secret(content.strip())
    keep_secret(secret)
    return secret


def _unhexed(content: bytes) -> bytes:
    try:
        return bytes.fromhex(content.decode("ascii"))
    except ValueError:
        return content
