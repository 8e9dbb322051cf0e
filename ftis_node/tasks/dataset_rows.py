"""Problems of a data set, and the digest by which the members of a run compare them.

Problem i is the i-th different question, in the order of the rows: a row that repeats an earlier question is left out.
The digest is SHA-256 over one line per problem, `["QUESTION","ANSWER"]` in JSON without spaces, in UTF-8, each ended by
a line feed. It does not depend on the file's format.

Rows of a data set, read in a child process that has limits of time and memory, and frees what its libraries take.

    python -m ftis_node.tasks.dataset_rows SOURCE-AS-JSON LIMIT_S      one JSON list of cells per row

The child passes on only the chosen columns. A local file is JSON lines, Parquet or CSV by the end of its name. The
library `datasets` streams rows of the hub. The parent keeps them in a file for starts at which the hub does not answer.
A fault is one line on stderr, and the exit code is that of its exception.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ftis_node.errors import FtisError, NetworkError, TaskError
from ftis_node.files import check_regular, replace_file
from ftis_node.tasks.dataset_hub import hub_rows
from ftis_node.tasks.dataset_query import DIGEST_HEX, FILE_SUFFIXES, DatasetQuery, RowSource, check_pattern
from ftis_node.tasks.problems import Problem
from ftis_node.tasks.spec import TaskPart

log = logging.getLogger(__name__)
FETCH_LIMIT_S: Final = 120.0
MAX_OUTPUT_BYTES: Final = 256 << 20  # of the chosen columns as JSON; a node holds them in memory
MAX_FILE_BYTES: Final = 4 << 30
MAX_WRITTEN_BYTES: Final = 64 << 20  # of a file that the child writes: `datasets` downloads a repository's card
MAX_MEMORY_BYTES: Final = 4 << 30  # of the child; a small Parquet file can hold one large text many times
MAX_LINE_BYTES: Final = 16 << 20
BATCH_ROWS: Final = 1024
MAX_COLUMNS_SHOWN: Final = 20
COMPRESSED: Final = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"(\xb5/\xfd": "zstd",
}
"""The first bytes of files that are not unpacked here. The user does that, and sees the size."""


def read_rows(source: RowSource, *, limit_s: float = FETCH_LIMIT_S, instead: str = "") -> list[list[Any]]:
    """Return the cells of each row, in the order of the columns.

    Raises TaskError, and NetworkError, which names `instead`, the spec of a local file. Both have one line.
    """
    kept = _kept_file(source) if source.hub else None
    if kept is not None and not kept.exists():
        log.warning("%s: reading its columns %s from the hub", source, " and ".join(source.columns))
    try:
        output = _output_of_child(source, limit_s, instead)
    except NetworkError as error:
        if kept is None or not kept.exists():
            raise
        log.warning("%s; using the rows that were read before", error)
        output = kept.read_bytes()
    else:
        if kept is not None:
            _keep(output, kept)
    return [json.loads(line) for line in output.splitlines()]


def _kept_file(source: RowSource) -> Path:
    from huggingface_hub.constants import HF_HOME

    name = hashlib.sha256(json.dumps(asdict(source)).encode()).hexdigest()[:DIGEST_HEX]
    return Path(HF_HOME, "ftis-node", f"{name}.jsonl")


def _keep(output: bytes, kept: Path) -> None:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_file(kept, output)
    except OSError as error:
        log.info("%s is not written: %s; each start needs the hub", kept, error)


def _output_of_child(source: RowSource, limit_s: float, instead: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="ftis-node-") as scratch:
        result = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(asdict(source)), str(limit_s)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | {"HF_HUB_CACHE": scratch, "HF_DATASETS_CACHE": scratch},
            check=False,
        )
    if result.returncode == 0:
        return result.stdout
    reason = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if result.returncode == -signal.SIGALRM:
        reason = f"{source}: not read within {limit_s:g} s"
    if result.returncode == NetworkError.exit_code or (source.hub and result.returncode == -signal.SIGALRM):
        raise NetworkError(f"{reason}: give a local file as {instead}")
    if result.returncode not in (TaskError.exit_code, -signal.SIGALRM):
        reason = f"{source} cannot be read ({reason or f'exit code {result.returncode}'})"
    raise TaskError(reason)


def _write_rows(source: RowSource) -> None:
    num_bytes = 0
    for row in _checked(source, hub_rows(source)) if source.hub else _file_rows(source):
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
    with file.open("rb") as start:
        head = start.read(8)
    for magic, kind in COMPRESSED.items():
        if head.startswith(magic):
            raise TaskError(f"{file} is compressed ({kind}): unpack it, and give the unpacked file")
    read = {".parquet": _parquet_rows, ".csv": _csv_rows}.get(file.suffix)
    return read(file, source) if read else _checked(source, _json_rows(file))


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if not line.strip():
                continue
            if len(line) > MAX_LINE_BYTES:
                raise TaskError(f"{file}:{number}: the line has more than {MAX_LINE_BYTES >> 20} MiB")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TaskError(f"{file}:{number}: invalid JSON ({error})") from None
            if not isinstance(row, dict):
                raise TaskError(f"{file}:{number}: the line must be a JSON object")
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
    except pyarrow.ArrowMemoryError:
        raise MemoryError from None
    except pyarrow.ArrowException as error:
        raise TaskError(f"{file}: invalid Parquet ({' '.join(str(error).split())})") from None


def _checked(source: RowSource, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        if number == 0:
            _check_columns(source, row)
        yield row


def _check_columns(source: RowSource, names: Iterable[str]) -> None:
    names = list(names)
    if missing := [name for name in source.columns if name not in names]:
        shown = ", ".join(map(repr, names[:MAX_COLUMNS_SHOWN])) or "none"
        raise TaskError(f"{source} has no column {missing[0]!r}: its columns are {shown}")


def _run(argument: str) -> int:
    try:
        source = RowSource(**json.loads(argument))
        if source.pattern:
            check_pattern(source.pattern)
        _write_rows(source)
        sys.stdout.flush()
    except FtisError as error:
        sys.stderr.write(f"\n{error}\n")  # a progress bar of the library may have left its line open
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{error.filename}: cannot be read ({error.strerror})\n")
        return TaskError.exit_code
    except MemoryError:
        sys.stderr.write(f"{source}: its rows need more than {MAX_MEMORY_BYTES >> 30} GiB of memory: take fewer rows\n")
        return TaskError.exit_code
    return 0


def digest_of(problems: tuple[Problem, ...]) -> str:
    """Return the digest of the problems, in hex."""
    digest = hashlib.sha256()
    for problem in problems:
        line = json.dumps([problem.question, problem.answer], ensure_ascii=False, separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:DIGEST_HEX]


def load_problems(part: TaskPart, split: str) -> tuple[Problem, ...]:
    """Return the problems of a split. Raises TaskError, and NetworkError if the hub cannot be reached."""
    query = part.rows
    if query is None:
        raise TaskError(f"{part} names no columns: add prompt=COLUMN&answer=COLUMN, or name the run that has them")
    source = _source(part, query, split)
    stat = Path(source.file).stat() if source.file and Path(source.file).is_file() else None
    instead = "dataset:PATH?QUERY" if part.is_dataset else f"{part.problems}:PATH"
    return _read(source, query.after, instead, stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino))


def has_test_split(part: TaskPart) -> bool:
    """Return whether the data set has held-out problems: a folder with a test file, or a split that the query names."""
    if part.path:
        folder = Path(part.path).expanduser()
        return folder.is_dir() and _file_in(folder, "test") is not None
    return bool(part.rows and part.rows.hub and part.rows.test)


def _source(part: TaskPart, query: DatasetQuery, split: str) -> RowSource:
    if part.path:
        file = Path(part.path).expanduser()
        found = _file_in(file, split) if file.is_dir() else file
        if found is None:
            raise TaskError(f"{file} has none of {', '.join(split + suffix for suffix in FILE_SUFFIXES)}")
        return RowSource(query.columns, file=str(found), pattern=query.pattern)
    if not query.hub:
        name = part.name.partition(":")[2]
        raise TaskError(f"{part.name} needs the run's data file: give it as --task dataset:PATH?name={name}")
    named = {"train": query.split, "test": query.test}[split]
    if not named and not part.is_dataset:
        raise TaskError(
            f"{part.problems} is for evaluation, it has no split {split!r}: train on another task, "
            f"or give a file of training problems as {part.problems}:PATH"
        )
    if not named:
        raise TaskError(f"{part.name} names no split of held-out problems: add test=SPLIT")
    parts = {"config": query.config, "revision": query.revision, "split": named}
    return RowSource(query.columns, hub=query.hub, **parts, pattern=query.pattern)


def _file_in(folder: Path, split: str) -> Path | None:
    files = (folder / (split + suffix) for suffix in FILE_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


@lru_cache(maxsize=2)
def _read(source: RowSource, after: str, instead: str, version: object) -> tuple[Problem, ...]:
    """Return the problems from a cache: a start needs them for the run's digest and for its task.

    `version` distinguishes the contents of a file that changed.
    """
    problems: dict[str, Problem] = {}
    num_rows = 0
    for num_rows, cells in enumerate(read_rows(source, instead=instead), start=1):
        try:
            question = _text(cells[0], source.columns[0])
            answer = _reference(cells[1], source.columns[1], after) if len(cells) > 1 else ""
        except ValueError as error:
            raise TaskError(f"{source}: row {num_rows}: {error}") from None
        problems.setdefault(question, Problem(question, answer))
    if not problems:
        raise TaskError(f"{source} has no rows")
    if num_rows > len(problems):
        num_left_out = num_rows - len(problems)
        log.info("%s: %d of %d rows repeat an earlier question and are left out", source, num_left_out, num_rows)
    return tuple(problems.values())


def _reference(cell: Any, column: str, after: str) -> str:
    text = _text(cell, column)
    if after:
        _, marker, text = text.rpartition(after)
        if not marker or not text.strip():
            raise ValueError(f"the column {column!r} has no text after {after!r}")
    return text.strip()


def _text(cell: Any, column: str) -> str:
    """Return a cell as stripped text. Raises ValueError unless it is a text or a finite number."""
    is_number = type(cell) is int or (isinstance(cell, float) and math.isfinite(cell))
    if not is_number and not isinstance(cell, str):
        raise ValueError(f"the column {column!r} must be a text or a number")
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    text = str(cell).strip()
    if not text:
        raise ValueError(f"the column {column!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # such text can be neither tokenized nor hashed
        raise ValueError(f"the column {column!r} holds an unpaired surrogate") from None
    return text


def _set_limits(limit_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM has no handler, so it ends this process wherever it hangs
    for kind, limit in ((resource.RLIMIT_DATA, MAX_MEMORY_BYTES), (resource.RLIMIT_FSIZE, MAX_WRITTEN_BYTES)):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(hard, limit)
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    _set_limits(float(sys.argv[2]))
    sys.exit(_run(sys.argv[1]))
