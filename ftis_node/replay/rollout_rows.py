"""Rows of `replay export`: one per group or per completion, with token ids and log-probs, optionally with texts.

Texts of peers are written unchanged, because a file of JSON lines or Parquet cannot control a terminal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from ftis_node.models.decoder import Decoder
from ftis_node.records.envelope import open_envelope
from ftis_node.records.group import Completion
from ftis_node.records.text_codec import unpack_any
from ftis_node.replay.prompts import PromptResolver

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ftis_node.config.home import Home
    from ftis_node.records.group import Group
    from ftis_node.records.text_group import TextCompletion, TextGroup
    from ftis_node.replay.reader import GroupSummary, ReplayReader

    Row = dict[str, Any]


def group_rows(reader: ReplayReader) -> Iterator[Row]:
    """Yield one row per group, oldest first: the row of `replay list` with its completions."""
    for summary, group in _groups(reader):
        yield {**dataclasses.asdict(summary), "completions": _completions(summary, group)}


class TextRows:
    """Source of rows with texts and peers' names. `missing` counts, by reason, the texts that could not be made."""

    def __init__(self, home: Home, names: Mapping[str, str]) -> None:
        """`names` are the nodes' names by peer id."""
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
            completions = [self._with_text(completion) for completion in _completions(summary, group)]
            yield {**dataclasses.asdict(summary), **texts, "completions": completions}

    def _with_text(self, completion: Row) -> Row:
        if "text" in completion:
            return completion
        text = self._decoder.text(completion["token_ids"])
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
            yield {
                **group,
                "completion_index": index,
                "completion": completion.get("text"),
                "token_ids": completion.get("token_ids"),
                "logprobs": completion.get("logprobs"),
                "mean_logprob": _mean_logprob(completion),
                "num_tokens": _num_tokens(completion),
                "finish_reason": completion["finish_reason"],
                "reward": completion["reward"],
            }


def _mean_logprob(completion: Row) -> float:
    if "logprobs" in completion:
        return sum(completion["logprobs"]) / len(completion["logprobs"])
    return float(completion["mean_logprob"])


def _num_tokens(completion: Row) -> int:
    """Return the number of tokens, counted with the sender's tokenizer."""
    return len(completion["token_ids"]) if "token_ids" in completion else int(completion["sender_tokens"])


def _groups(reader: ReplayReader) -> Iterator[tuple[GroupSummary, Group | TextGroup]]:
    return ((summary, unpack_any(open_envelope(envelope).body)) for summary, envelope in reader.all_groups())


def _completions(summary: GroupSummary, group: Group | TextGroup) -> list[Row]:
    completions: Sequence[Completion | TextCompletion] = group.completions
    return [
        {**_contents(completion), "finish_reason": completion.finish_reason.value, "reward": reward}
        for completion, reward in zip(completions, summary.rewards, strict=True)
    ]


def _contents(completion: Completion | TextCompletion) -> Row:
    if isinstance(completion, Completion):
        return {"token_ids": completion.token_ids.tolist(), "logprobs": completion.logprobs.tolist()}
    return {
        "text": completion.text,
        "mean_logprob": completion.mean_logprob,
        "sender_tokens": completion.num_tokens,
    }
