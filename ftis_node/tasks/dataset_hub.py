"""Rows of a data set of the hub, streamed. Only the child process of `dataset_rows` calls this module.

Nothing is unpacked on the disk: a small archive can unpack to many times its size, and another person may have named
it. The parent limits what it takes of the rows.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ftis_node.errors import NetworkError, TaskError
from ftis_node.tasks.dataset_query import RowSource

PROBE_LIMIT_S: Final = 5.0
SPLIT = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<first>[0-9]*):(?P<end>[0-9]*)\])?")


def hub_rows(source: RowSource) -> Iterator[dict[str, Any]]:
    """Yield the rows of the split. Raises NetworkError and TaskError."""
    if Path(source.hub).exists():  # `datasets` would read it, and another person may have written the manifest
        raise TaskError(f"{source}: a folder or file here has the name of the repository: start in another folder")
    split = SPLIT.fullmatch(source.split)
    if split is None:
        raise TaskError(f"{source}: the split must be NAME or NAME[FIRST:END], such as train[:1000]")
    try:
        yield from _streamed(source, split)
    except Exception as error:  # the library has dozens of them
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise NetworkError(f"cannot get {source} from the hub ({reason})") from None


def _streamed(source: RowSource, split: re.Match[str]) -> Iterator[dict[str, Any]]:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    _check_answers(constants.ENDPOINT)
    import datasets

    rows = datasets.load_dataset(
        source.hub, source.config or None, revision=source.revision or None, split=split["name"], streaming=True
    )
    if set(source.columns) <= set(rows.column_names or ()):
        rows = rows.select_columns(list(source.columns))  # others may be images, which would be decoded
    first = int(split["first"] or 0)
    rows = rows.skip(first)
    if split["end"]:
        rows = rows.take(max(0, int(split["end"]) - first))
    yield from rows


def _check_answers(address: str) -> None:
    """Raise OSError unless a server answers at the address: `datasets` would try again for minutes."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_LIMIT_S).close()  # nosec B310: the hub's own address
    except urllib.error.HTTPError:
        return
