"""Parser of `--peers`: multiaddrs separated by commas, and `@FILE` for a file with one on each line.

`ftis-node bootstrap --address-file` writes such a file. A container can read it from a volume, a fleet from its
configuration management. No start script has to paste an address.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ftis_node.errors import FileError
from ftis_node.files import read_text

MAX_FILE_BYTES = 1 << 16


def read_peers(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the multiaddrs in order, each once. Raises ValueError for a file that cannot be used."""
    parts = given.split(",") if isinstance(given, str) else given
    named = [address for part in parts if part.strip() for address in _named_by(part.strip())]
    return tuple(dict.fromkeys(named))


def _named_by(part: str) -> list[str]:
    """Return the address, or those of the file behind `@`; `#` begins a comment in the file."""
    if not part.startswith("@"):
        return [part]
    path = Path(part[1:])
    try:
        text = read_text(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"the file of peers {path} cannot be read ({error.strerror})") from None
    except FileError as error:
        raise ValueError(f"the file of peers cannot be read: {error}") from None
    if "\x00" in text:
        raise ValueError(f"the file of peers {path} is not a text file of at most {MAX_FILE_BYTES >> 10} KiB")
    lines = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    if not any(lines):
        raise ValueError(f"the file of peers {path} is empty: write one multiaddr on each line")
    return [line for line in lines if line]
