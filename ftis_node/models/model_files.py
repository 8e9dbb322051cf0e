"""Files of a model's folder: its small JSON files, and the headers of its weights.

The header of a safetensors file is the cheapest proof that a weight file is whole. A file is eight bytes of header
length (little-endian), a JSON header and the tensors' bytes (safetensors README, section "Format"). So an incomplete
file is found without torch and without reading gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.errors import FileError, ModelError
from ftis_node.files import check_regular, read_object

CONFIG_FILE = "config.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3")  # the format's names


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in `path`. Raises ModelError if it is missing or no object."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ModelError(f"folder {path.parent} has no {path.name}: it is not a transformers model") from None
    except (OSError, FileError) as error:
        raise ModelError(str(error)) from error


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Header of a file: dtype, shape and data offsets by tensor name; `data_start` is the position of offset 0."""

    tensors: dict[str, dict[str, Any]]
    data_start: int
    num_bytes: int


def read_header(path: Path) -> SafetensorsHeader:
    """Return the header of `path`, checked against the file's size. Raises ModelError if the file is damaged."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            num_header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if num_header_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {num_header_bytes} bytes")
            header = json.loads(file.read(num_header_bytes))
        header.pop("__metadata__", None)
        num_data_bytes = max((_end_of(entry) for entry in header.values()), default=0)
    except FileError as error:
        raise ModelError(str(error)) from None
    except PermissionError as error:
        raise ModelError(f"weight file {path} cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ModelError(f"weight file {path} is damaged: its header is nested too deep") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"weight file {path} is damaged: {error}") from error
    data_start = LENGTH_BYTES + num_header_bytes
    num_bytes = path.stat().st_size
    if num_bytes != data_start + num_data_bytes:
        raise ModelError(f"weight file {path} is damaged: {num_bytes} bytes instead of {data_start + num_data_bytes}")
    return SafetensorsHeader(tensors=header, data_start=data_start, num_bytes=num_bytes)


def _end_of(entry: dict[str, Any]) -> int:
    """Return the end of a tensor's bytes. Raises ValueError, KeyError or TypeError for an invalid entry."""
    start, end = entry["data_offsets"]
    numbers = [*entry["shape"], start, end]
    if not isinstance(entry["dtype"], str) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("an entry of the header describes no tensor")
    if start > end:
        raise ValueError("a tensor ends before it begins")
    return int(end)


def check_tensors(
    what: str, entries: Mapping[str, Any], own: Mapping[str, tuple[int, ...]], *, optional: Iterable[str]
) -> None:
    """Raise ModelError if the tensors of a header are not exactly those of `own`, as floats.

    `own` has shapes by name; the file may have the names `optional`, too. `what` begins the error.
    """
    found = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    problems = (
        ("lacks", sorted(own.keys() - found.keys())),
        ("names unknown", sorted(found.keys() - own.keys() - set(optional))),
        ("has another shape of", sorted(name for name in own.keys() & found.keys() if own[name] != found[name])),
        ("has integers in", sorted(name for name, entry in entries.items() if entry["dtype"] not in FLOATS)),
    )
    for problem, names in problems:
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"{what} do not fit the model: the file {problem} {names[0]}{others}")
