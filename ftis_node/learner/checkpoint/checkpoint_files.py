"""Files of a checkpoint, and their checksums, which detect disk errors. No torch.

safetensors validates only its header and its length: a flipped bit in a tensor would load without an error. So
`checksums.json` has the CRC-32 of each file. It detects disk errors, not forgery. CRC-32 takes 0.6 s of a core for a
gigabyte, BLAKE2b 2 s; a model of 3B parameters has 36 GB of weights and moments.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ftis_node.errors import FileError, ModelError
from ftis_node.files import read_file

CHECKSUMS_FILE = "checksums.json"
CHUNK_BYTES = 16 << 20
CHECKPOINT_PREFIX, DAMAGED_PREFIX = "step-", "damaged-"
STATE_FILE = "state.json"
MAX_UNSAVED_STEPS = 100  # even if writes are slow: the buffer keeps the groups of unsaved steps


def checksum_of(path: Path) -> str:
    """Return the file's checksum in hex. Raises OSError."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of these files of `folder` beside them. Raises OSError."""
    sums = {name: checksum_of(folder / name) for name in names}
    (folder / CHECKSUMS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(sums)))


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums by file name. Raises ModelError if they cannot be read."""
    try:
        return msgspec.json.decode(read_file(folder / CHECKSUMS_FILE), type=dict[str, str])
    except (OSError, FileError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{CHECKSUMS_FILE} cannot be read: {error}") from error


def check_file(folder: Path, name: str, sums: Mapping[str, str]) -> None:
    """Raise ModelError if the file is missing or its checksum differs."""
    try:
        found = checksum_of(folder / name)
    except OSError as error:
        raise ModelError(f"{name} cannot be read: {error}") from error
    if found != sums.get(name):
        raise ModelError(f"{name} changed on disk: its checksum differs from the one in {CHECKSUMS_FILE}")
