"""Files of rows: each writer holds a bounded part of a large buffer, and every table has the same columns."""

import tracemalloc
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ftis_node.records.identity import Identity
from ftis_node.replay.export import flat_rows, group_rows, write_jsonl, write_parquet
from ftis_node.replay.reader import ReplayReader
from tests.conftest import accept, fill_buffer, make_completion, make_group

NUM_GROUPS = 128
TOKENS_PER_GROUP = 2048
NUMBERS_BYTES = 68  # of one token: an int, a float, and their list items
MAX_TRACED_BYTES = 8 << 20
MAX_ARROW_BYTES = 4 << 20
WRITERS = {"jsonl": write_jsonl, "parquet-flat": partial(write_parquet, with_texts=False, is_flat=True)}


@pytest.fixture(scope="module")
def large_buffer(tmp_path_factory):
    """Return the path of a buffer whose rows take more than twice the bound as Python numbers."""
    assert NUM_GROUPS * TOKENS_PER_GROUP * NUMBERS_BYTES > 2 * MAX_TRACED_BYTES
    identity = Identity.from_seed(bytes(range(32)))
    path = tmp_path_factory.mktemp("large") / "replay.sqlite"
    completions = tuple(make_completion(*range(1000, 1000 + TOKENS_PER_GROUP // 2)) for _ in range(2))
    groups = (make_group(identity, number=number, completions=completions) for number in range(NUM_GROUPS))
    fill_buffer(path, *(accept(group, identity) for group in groups))
    return path


def _peak(write: Callable[[], int]) -> tuple[int, int]:
    """Return the number of rows and the peak of the bytes of Python objects."""
    tracemalloc.start()
    try:
        return write(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", WRITERS)
def test_a_writer_holds_a_bounded_part_of_the_buffer(large_buffer, tmp_path, form, monkeypatch):
    monkeypatch.setattr("ftis_node.replay.export.MAX_TOKENS_AT_ONCE", 1 << 16)
    pa.array([{}])  # loads pandas now, so that its modules do not count below
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    reader = ReplayReader(large_buffer)
    rows = flat_rows(group_rows(reader)) if "flat" in form else group_rows(reader)
    try:
        count, num_bytes = _peak(lambda: WRITERS[form](rows, tmp_path / "rows"))
    finally:
        pa.set_memory_pool(before)
        reader.close()
    assert count == NUM_GROUPS * (2 if "flat" in form else 1)
    assert num_bytes < MAX_TRACED_BYTES
    assert pool.max_memory() < MAX_ARROW_BYTES


def test_a_table_without_rows_has_the_same_columns(large_buffer, tmp_path):
    with closing(ReplayReader(large_buffer)) as reader:
        (row, *_) = rows = list(group_rows(reader))[:3]
    for is_flat in (False, True):
        made = list(flat_rows(iter(rows))) if is_flat else rows
        write = partial(write_parquet, is_flat=is_flat, with_texts=False)
        assert (write(made, tmp_path / "full"), write([], tmp_path / "empty")) == (len(made), 0)
        full, empty = (pq.read_table(tmp_path / name) for name in ("full", "empty"))
        assert (full.schema, full.column_names) == (empty.schema, list(made[0]))
    completion = pq.read_table(tmp_path / "full").to_pylist()[0]
    assert completion["token_ids"] == row["completions"][0]["token_ids"]
    assert completion["logprobs"] == row["completions"][0]["logprobs"], "as the sender signed them"


def test_row_groups_are_bounded(large_buffer, tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.replay.export.MAX_ROWS_AT_ONCE", 2)
    with closing(ReplayReader(large_buffer)) as reader:
        rows = list(group_rows(reader))[:5]
    assert write_parquet(rows, tmp_path / "rows", with_texts=False, is_flat=False) == 5
    table = pq.ParquetFile(tmp_path / "rows")
    assert [table.metadata.row_group(place).num_rows for place in range(3)] == [2, 2, 1]
