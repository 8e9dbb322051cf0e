"""A run's manifest in the directory, under its own hash: a node that knows the run id can fetch it from any node.

The id is the first 16 bytes of the SHA-256 of the manifest's canonical text, so a forged manifest does not match. It is
stored compressed; the decompressed size is bounded.
"""

from __future__ import annotations

import hashlib
import zlib

MAX_MANIFEST_BYTES = 1 << 16
RUN_ID_HEX = 32


def pack_manifest(canonical: bytes) -> bytes:
    """Return the payload of a manifest's entry."""
    return zlib.compress(canonical, level=9)


def unpack_manifest(payload: bytes, *, run_id: str) -> bytes | None:
    """Return the canonical text; None if the payload is not this run's manifest."""
    inflater = zlib.decompressobj()
    try:
        canonical = inflater.decompress(payload, MAX_MANIFEST_BYTES)
    except zlib.error:
        return None
    is_whole = inflater.eof and not inflater.unused_data
    return canonical if is_whole and hashlib.sha256(canonical).hexdigest()[:RUN_ID_HEX] == run_id else None
