"""Rows of a data set, read in a child process that has a time limit and frees the memory of its libraries.

    python -m ftis_node.tasks.dataset.rows SOURCE-AS-JSON LIMIT_S     one JSON list of cells per row on stdout

The child reads only the columns of the query. A local file is JSON lines, Parquet or CSV by the end of its name. The
library `datasets` reads the hub. A fault is one line on stderr, and the exit code is that of its exception.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ftis_node.errors import FtisError, NetworkError, TaskError
from ftis_node.files import check_regular
from ftis_node.tasks.hub import FETCH_LIMIT_S, go_offline_without_hub

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_FILE_BYTES: Final = 4 << 30
MAX_OUTPUT_BYTES: Final = 256 << 20  # of the chosen columns as JSON; a node holds them in memory
MAX_LINE_BYTES: Final = 16 << 20
BATCH_ROWS: Final = 1024
MAX_COLUMNS_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class RowSource:
    """Local `file`, or a `split` of a repository `hub`; and the columns to read."""

    columns: tuple[str, ...]
    file: str = ""
    hub: str = ""
    config: str = ""
    revision: str = ""
    split: str = ""

    def __str__(self) -> str:
        return self.file or f"{self.hub} ({self.split})"


def read_rows(source: RowSource, *, limit_s: float = FETCH_LIMIT_S) -> list[list[Any]]:
    """Return the cells of each row, in the order of the columns. Raises TaskError and NetworkError in one line."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(source)), str(limit_s)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if result.returncode == 0:
        return [json.loads(line) for line in result.stdout.splitlines()]
    reason = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if result.returncode == -signal.SIGALRM:
        reason = f"{source}: not read within {limit_s:g} s"
    if result.returncode == NetworkError.exit_code or (source.hub and result.returncode == -signal.SIGALRM):
        raise NetworkError(f"{reason}: give a local file as dataset:PATH?QUERY")
    if result.returncode not in (TaskError.exit_code, -signal.SIGALRM):
        reason = f"{source} cannot be read ({reason or f'exit code {result.returncode}'})"
    raise TaskError(reason)


def _write_rows(source: RowSource) -> None:
    num_bytes = 0
    for row in _hub_rows(source) if source.hub else _file_rows(source):
        line = json.dumps([row.get(name) for name in source.columns], default=lambda value: [type(value).__name__])
        num_bytes += len(line) + 1
        if num_bytes > MAX_OUTPUT_BYTES:
            raise TaskError(
                f"{source}: its columns {' and '.join(source.columns)} have more than {MAX_OUTPUT_BYTES >> 20} MiB: "
                "take fewer rows"
            )
        sys.stdout.write(line + "\n")


def _file_rows(source: RowSource) -> Iterator[dict[str, Any]]:
    file = Path(source.file)
    check_regular(file)
    if (size := file.stat().st_size) > MAX_FILE_BYTES:
        raise TaskError(f"{file}: {size >> 30} GiB are too many, at most {MAX_FILE_BYTES >> 30} GiB: take fewer rows")
    read = {".parquet": _parquet_rows, ".csv": _csv_rows}.get(file.suffix, _json_rows)
    return read(file, source)


def _json_rows(file: Path, source: RowSource) -> Iterator[dict[str, Any]]:
    blank = 0
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if not line.strip():
                blank = blank or number
                continue
            if blank:
                raise TaskError(f"{file}:{blank}: the line is empty")
            if len(line) > MAX_LINE_BYTES:
                raise TaskError(f"{file}:{number}: the line has more than {MAX_LINE_BYTES >> 20} MiB")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TaskError(f"{file}:{number}: invalid JSON ({error})") from None
            if not isinstance(row, dict):
                raise TaskError(f"{file}:{number}: the line must be a JSON object")
            if number == 1:
                _check_columns(source, row)
            yield row


def _csv_rows(file: Path, source: RowSource) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            _check_columns(source, rows.fieldnames or ())
            yield from rows
        except (csv.Error, UnicodeDecodeError) as error:
            raise TaskError(f"{file}:{rows.line_num + 1}: invalid CSV ({error})") from None


def _parquet_rows(file: Path, source: RowSource) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file)
        _check_columns(source, table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=list(source.columns)):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise TaskError(f"{file}: invalid Parquet ({' '.join(str(error).split())})") from None


def _hub_rows(source: RowSource) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("datasets") is None:
        raise TaskError(f"{source} needs the package datasets: install it, or give a local file as dataset:PATH?QUERY")
    if Path(source.hub).exists():  # `datasets` would read it, and another person may have written the manifest
        raise TaskError(f"{source}: a folder or file here has the name of the repository: start in another folder")
    go_offline_without_hub()
    from datasets import load_dataset

    try:
        rows = load_dataset(source.hub, source.config or None, split=source.split, revision=source.revision or None)
    except Exception as error:  # the library has dozens of them
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise NetworkError(f"cannot get {source} from the hub ({reason})") from None
    _check_columns(source, rows.column_names)
    yield from rows.select_columns(list(source.columns))


def _check_columns(source: RowSource, names: Iterable[str]) -> None:
    """Raise TaskError if the data set lacks a column of the query."""
    names = list(names)
    if missing := [name for name in source.columns if name not in names]:
        shown = ", ".join(map(repr, names[:MAX_COLUMNS_SHOWN])) or "none"
        raise TaskError(f"{source} has no column {missing[0]!r}: its columns are {shown}")


def _run(argument: str) -> int:
    """Write the rows, and return the exit code."""
    try:
        _write_rows(RowSource(**json.loads(argument)))
        sys.stdout.flush()
    except FtisError as error:
        sys.stderr.write(f"\n{error}\n")  # a progress bar of the library may have left its line open
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{error.filename}: cannot be read ({error.strerror})\n")
        return TaskError.exit_code
    return 0


if __name__ == "__main__":
    # SIGALRM has no handler, so it ends this process wherever it hangs.
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
    sys.exit(_run(sys.argv[1]))
