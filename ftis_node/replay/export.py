"""Rows of `replay export`, one per group or per completion, and its files: JSON lines or Parquet.

Texts of peers are written unchanged, because such a file cannot control a terminal. Each writer holds a bounded part of
the rows in memory, because a buffer can be larger than the memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from ftis_node.config.home import Home
from ftis_node.models.decoder import Decoder
from ftis_node.records.codec import unpack_any
from ftis_node.records.envelope import open_envelope
from ftis_node.records.group import Completion, Group, TextCompletion, TextGroup, interleave
from ftis_node.replay.group_history import PromptResolver
from ftis_node.replay.reader import GroupSummary, ReplayReader

Row = dict[str, Any]

MAX_TOKENS_AT_ONCE: Final = 1 << 17  # of a row group; about 10 MB of Python numbers
MAX_ROWS_AT_ONCE: Final = 4096


def write_jsonl(rows: Iterable[Row], out: Path) -> int:
    """Write one JSON object per line and return the number of rows. Raises OSError if the disk refuses."""
    count = 0
    with out.open("wb") as file:
        for count, row in enumerate(rows, start=1):  # noqa: B007  # the last count is the result
            file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
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
    """Return the columns of the rows. A completion sent as text has None for token ids, other ones for texts.

    Completions of one turn have None for `turn_lengths` and `observation_ids`.
    """
    import pyarrow as pa

    group = [
        *(("id", pa.string()), ("own", pa.bool_()), ("sender", pa.string()), ("number", pa.int64())),
        *(("state", pa.string()), ("reason", pa.string()), ("step", pa.int64()), ("task", pa.string())),
        *(("prompt_index", pa.int64()), ("model", pa.string()), ("policy_version", pa.int64())),
        *(("created_at", pa.float64()), ("admitted_at", pa.float64())),
    ]
    texts = [(name, pa.string()) for name in ("sender_name", "prompt", "answer")] if with_texts else []
    ids = pa.list_(pa.int32())
    turns = [("turn_lengths", ids), ("observation_ids", pa.list_(ids))]
    tokens = [("token_ids", ids), ("logprobs", pa.list_(pa.float32())), *turns]
    end = [("finish_reason", pa.string()), ("reward", pa.float64())]
    if is_flat:
        place = [("completion_index", pa.int64()), ("completion", pa.string())]
        sums = [("mean_logprob", pa.float64()), ("num_tokens", pa.int64())]
        return pa.schema([*group, *texts, *place, *tokens, *sums, *end])
    as_text = [("text", pa.string()), ("mean_logprob", pa.float64()), ("sender_tokens", pa.int64())]
    completions = pa.list_(pa.struct([*tokens, *as_text, *end]))
    sums = [("num_tokens", pa.int64()), ("rewards", pa.list_(pa.float64()))]
    return pa.schema([*group, *sums, *texts, ("completions", completions)])


def group_rows(reader: ReplayReader) -> Iterator[Row]:
    """Yield one row per group, oldest first: the row of `replay list` with its completions."""
    for summary, group in _groups(reader):
        yield {**dataclasses.asdict(summary), "completions": _completions(reader, summary, group)}


class TextRows:
    """Source of rows with texts and peers' names. `missing` counts, by reason, the texts that could not be made."""

    def __init__(self, home: Home, names: Mapping[str, str]) -> None:
        self._decoder = Decoder(home)
        self._prompts = PromptResolver(home)
        self._names = names
        self.missing: Counter[str] = Counter()

    def group_rows(self, reader: ReplayReader) -> Iterator[Row]:
        """Yield one row per group with `sender_name`, `prompt` and `answer`, and each completion with its `text`."""
        for summary, group in _groups(reader):
            prompt = self._prompts.resolve(group)
            if prompt.missing:
                self.missing[prompt.missing] += 1
            texts = {
                "sender_name": self._names.get(summary.sender),
                "prompt": prompt.content,
                "answer": prompt.answer or None,
            }
            rows = _completions(reader, summary, group)
            completions = [self._with_text(completion, group.end_ids) for completion in rows]
            yield {**dataclasses.asdict(summary), **texts, "completions": completions}

    def _with_text(self, completion: Row, end_ids: Sequence[int]) -> Row:
        if "text" in completion:
            return completion
        ids = completion["token_ids"]
        if turns := completion.get("turn_lengths"):  # the text has the observations, as the chat template renders them
            ids = interleave(np.array(ids, dtype=np.int32), turns, completion["observation_ids"])[0].tolist()
        text = self._decoder.answer(ids, end_ids=end_ids)
        if text is None:
            self.missing[self._decoder.missing or "a token is not in the tokenizer's vocabulary"] += 1
        return {**completion, "text": text}


def flat_rows(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield one row per completion with fixed keys: the group's fields, `completion_index`, the completion's fields.

    The text is `completion`, None if it is unknown. A completion sent as text has None as `token_ids` and `logprobs`.
    """
    for row in rows:
        group = {key: value for key, value in row.items() if key not in ("completions", "rewards", "num_tokens")}
        for index, completion in enumerate(row["completions"]):
            if "token_ids" in completion:
                num_tokens = len(completion["token_ids"])
                mean_logprob = sum(completion["logprobs"]) / num_tokens
            else:
                num_tokens, mean_logprob = int(completion["sender_tokens"]), float(completion["mean_logprob"])
            yield {
                **group,
                "completion_index": index,
                "completion": completion.get("text"),
                "token_ids": completion.get("token_ids"),
                "logprobs": completion.get("logprobs"),
                "turn_lengths": completion.get("turn_lengths"),
                "observation_ids": completion.get("observation_ids"),
                "mean_logprob": mean_logprob,
                "num_tokens": num_tokens,
                "finish_reason": completion["finish_reason"],
                "reward": completion["reward"],
            }


def _groups(reader: ReplayReader) -> Iterator[tuple[GroupSummary, Group | TextGroup]]:
    return ((summary, unpack_any(open_envelope(envelope).body)) for summary, envelope in reader.all_groups())


def _completions(reader: ReplayReader, summary: GroupSummary, group: Group | TextGroup) -> list[Row]:
    has_turns = isinstance(group, Group) and bool(group.turn_lengths)
    observations = iter(reader.observation_ids(bytes.fromhex(summary.id)) if has_turns else ())
    completions: Sequence[Completion | TextCompletion] = group.completions
    rows: list[Row] = []
    for completion, reward in zip(completions, summary.rewards, strict=True):
        if isinstance(completion, Completion):
            row: Row = {"token_ids": completion.token_ids.tolist(), "logprobs": completion.logprobs.tolist()}
            if completion.turn_lengths:
                row["turn_lengths"] = list(completion.turn_lengths)
                row["observation_ids"] = list(islice(observations, len(completion.turn_lengths) - 1))
        else:
            row = {"text": completion.text, "mean_logprob": completion.mean_logprob}
            row["sender_tokens"] = completion.num_tokens
        rows.append(row | {"finish_reason": completion.finish_reason.value, "reward": reward})
    return rows


class RolloutTable:
    """Read-only view of a home's replay buffer, exported as `ftis_node.ReplayBuffer`. It works beside a running node.

    A row is one completion, with the keys of `replay export --flat`.
    """

    def __init__(self, home: Home) -> None:
        self._home = home

    @classmethod
    def open(cls, home: str | Path) -> RolloutTable:
        """Return the rollouts of the node's home. Raises ConfigError if it has no buffer."""
        where = Home(Path(home).expanduser())
        ReplayReader(where.replay).close()
        return cls(where)

    def rows(self) -> Iterator[dict[str, Any]]:
        with closing(ReplayReader(self._home.replay)) as reader:
            yield from flat_rows(group_rows(reader))

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row per completion."""
        import pandas

        return pandas.DataFrame(list(self.rows()))

    def to_dataset(self) -> Any:
        """Return a `datasets.Dataset` with one row per completion."""
        import datasets

        return datasets.Dataset.from_list(list(self.rows()))
