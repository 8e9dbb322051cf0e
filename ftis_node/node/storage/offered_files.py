"""The files of offered weights: hashed, and kept by hard links."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from ftis_node.records.bounds import MAX_CHUNK_BYTES

log = logging.getLogger(__name__)


def digests_of(path: Path) -> tuple[int, bytes, bytes]:
    """Return the size of a file in bytes, its SHA-256, and the concatenated ones of its chunks, in one pass over it."""
    whole, chunks, num_bytes = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        while chunk := file.read(MAX_CHUNK_BYTES):
            whole.update(chunk)
            chunks.append(hashlib.sha256(chunk).digest())
            num_bytes += len(chunk)
    return num_bytes, whole.digest(), b"".join(chunks)


def keep_file(file: Path, path: Path, *, afresh: bool) -> None:
    """Hard-link `file` to `path`, or copy it. With `afresh`, first remove the files of an earlier start."""
    if afresh:
        shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    try:
        os.link(file, path)
    except OSError as error:  # for example a file system without hard links
        log.debug("%s is copied: %s", file, error)
        shutil.copyfile(file, path)
