"""Files of `replay export`: rows as JSON lines, MessagePack or Parquet.

Each writer holds a bounded part of the rows in memory, because a buffer can be larger than the memory.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    Row = dict[str, Any]

MAX_TOKENS_AT_ONCE: Final = 1 << 17  # of a row group; about 10 MB of Python numbers
MAX_ROWS_AT_ONCE: Final = 4096


def write_jsonl(rows: Iterable[Row], out: Path) -> int:
    """Write one JSON object per line and return the number of rows. Raises OSError if the disk refuses."""
    count = 0
    with out.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, start=1):  # noqa: B007  # the last count is the result
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return count


def write_msgpack(rows: Iterable[Row], out: Path) -> int:
    """Write one map per row and return the number of rows. Raises OSError if the disk refuses."""
    import msgpack

    packer, count = msgpack.Packer(), 0
    with out.open("wb") as file:
        for count, row in enumerate(rows, start=1):  # noqa: B007  # the last count is the result
            file.write(packer.pack(row))
    return count


def write_parquet(rows: Iterable[Row], out: Path, *, with_texts: bool, is_flat: bool) -> int:
    """Write row groups of about `MAX_TOKENS_AT_ONCE` tokens and return the number of rows.

    The columns do not depend on the rows, so an empty buffer gives an empty table. Raises OSError if the disk refuses.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, count = rows_schema(with_texts=with_texts, is_flat=is_flat), 0
    with out.open("wb") as file, pq.ParquetWriter(file, schema) as writer:
        for batch in _batches(rows):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
            count += len(batch)
            batch.clear()  # before the next rows are read
    return count


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists; a list ends with the row that reaches a limit."""
    batch: list[Row] = []
    num_tokens = 0
    for row in rows:
        batch.append(row)
        num_tokens += row["num_tokens"]
        if num_tokens >= MAX_TOKENS_AT_ONCE or len(batch) >= MAX_ROWS_AT_ONCE:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def rows_schema(*, with_texts: bool, is_flat: bool) -> Any:
    """Return the columns of `rollout_rows`. A completion sent as text has None for token ids, other ones for texts."""
    import pyarrow as pa

    group = [
        *(("id", pa.string()), ("own", pa.bool_()), ("sender", pa.string()), ("number", pa.int64())),
        *(("state", pa.string()), ("reason", pa.string()), ("step", pa.int64()), ("task", pa.string())),
        *(("prompt_index", pa.int64()), ("model", pa.string()), ("policy_version", pa.int64())),
        *(("created_at", pa.float64()), ("admitted_at", pa.float64())),
    ]
    texts = [(name, pa.string()) for name in ("sender_name", "prompt", "answer")] if with_texts else []
    tokens = [("token_ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32()))]
    end = [("finish_reason", pa.string()), ("reward", pa.float64())]
    if is_flat:
        place = [("completion_index", pa.int64()), ("completion", pa.string())]
        sums = [("mean_logprob", pa.float64()), ("num_tokens", pa.int64())]
        return pa.schema([*group, *texts, *place, *tokens, *sums, *end])
    as_text = [("text", pa.string()), ("mean_logprob", pa.float64()), ("sender_tokens", pa.int64())]
    completions = pa.list_(pa.struct([*tokens, *as_text, *end]))
    sums = [("num_tokens", pa.int64()), ("rewards", pa.list_(pa.float64()))]
    return pa.schema([*group, *sums, *texts, ("completions", completions)])
