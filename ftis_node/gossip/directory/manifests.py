"""A run's manifest in the directory, under its own hash: who knows a run's id can have the rest of it from anybody.

The id is the first 16 bytes of the SHA-256 of the manifest's canonical text, so nobody can pass another one off. It is
stored compressed; what it grows to is bounded before it does.
"""

from __future__ import annotations

import hashlib
import zlib

MAX_MANIFEST_BYTES = 1 << 16
RUN_ID_HEX = 32


def pack_manifest(canonical: bytes) -> bytes:
    """The payload of a manifest's entry."""
    return zlib.compress(canonical, level=9)


def unpack_manifest(payload: bytes, *, run_id: str) -> bytes | None:
    """The canonical text; None where the payload is not that of this run's manifest."""
    inflater = zlib.decompressobj()
    try:
        canonical = inflater.decompress(payload, MAX_MANIFEST_BYTES)
    except zlib.error:
        return None
    is_whole = inflater.eof and not inflater.unused_data
    return canonical if is_whole and hashlib.sha256(canonical).hexdigest()[:RUN_ID_HEX] == run_id else None
