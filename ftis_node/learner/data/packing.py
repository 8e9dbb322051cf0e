"""Micro-batches without padding: one row holds several sequences end to end, and a group's prompt only once.

    prompt p1 p2 p3 | a1 a2 | b1 | c1 c2 c3        a, b, c attend to the prompt and themselves, not each other

With G completions the prompt runs through the model once instead of G times. A completion's last token predicts nothing
and is omitted. Whole groups are packed, longest first, each into the first row with enough space. A group that exceeds
a row's budget is divided between completions, and each part contains its prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ftis_node.learner.data.batch import MicroBatch, SequenceSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ftis_node.learner.data.batch import TrainBatch


def make_packed_micro_batches(batch: TrainBatch, *, max_tokens: int, shares_prompts: bool = True) -> list[MicroBatch]:
    """Return rows of at most `max_tokens` positions. A longer completion with its prompt gets a separate row.

    Without `shares_prompts` each completion follows its own copy of the prompt.
    """
    families = [part for rows in _groups(batch, shares_prompts) for part in _cut(batch, rows, max_tokens)]
    rows: list[list[list[int]]] = []
    room: list[int] = []
    for family in sorted(families, key=lambda family: (-_length(batch, family), family)):
        length = _length(batch, family)
        fitting = next((number for number, left in enumerate(room) if left >= length), None)
        if fitting is None:
            rows.append([])
            room.append(max_tokens)
            fitting = len(rows) - 1
        rows[fitting].append(family)
        room[fitting] -= length
    return [_lay_out(batch, families) for families in rows]


def _groups(batch: TrainBatch, shares_prompts: bool) -> list[list[int]]:
    """Return the rows of the batch by their shared prompt, without rows that have no tokens."""
    numbers = batch.group_ids.tolist() if shares_prompts else range(len(batch.completions))
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(numbers):
        if len(batch.completions[row]):
            groups.setdefault(number, []).append(row)
    return list(groups.values())


def _cut(batch: TrainBatch, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the rows of one prompt in parts that fit, of about equal length."""
    longest_first = sorted(rows, key=lambda row: (-len(batch.completions[row]), row))
    parts: list[list[int]] = []
    for row in longest_first:
        fitting = next((part for part in parts if _length(batch, [*part, row]) <= max_tokens), None)
        if fitting is None:
            parts.append([row])
        else:
            fitting.append(row)
    return [sorted(part) for part in parts]


def _length(batch: TrainBatch, rows: Sequence[int]) -> int:
    """Return the positions of one prompt and these completions."""
    return len(batch.prompts[rows[0]]) + sum(len(batch.completions[row]) - 1 for row in rows)


class _Row:
    """A row under construction."""

    def __init__(self) -> None:
        self.length = 0
        self.ids: list[NDArray[np.int32]] = []
        self.positions: list[NDArray[np.int64]] = []

    def add(self, ids: NDArray[np.int32], *, position: int) -> SequenceSpan:
        """Append `ids`, of which the first is at `position` in its text."""
        span = SequenceSpan(self.length, self.length + len(ids))
        self.ids.append(ids)
        self.positions.append(np.arange(position, position + len(ids)))
        self.length = span.end
        return span


def _lay_out(batch: TrainBatch, families: Sequence[Sequence[int]]) -> MicroBatch:
    row = _Row()
    texts: list[tuple[SequenceSpan, ...]] = []
    predictors, targets, cells = [], [], []
    for family in families:
        first = batch.prompts[family[0]]
        if len(family) == 1:  # one text: there is no prompt to share
            first = np.concatenate([first, batch.completions[family[0]][:-1]])
        prompt = row.add(first, position=0)
        last = prompt.start + len(batch.prompts[family[0]]) - 1
        parts = []
        for number in family:
            completion = batch.completions[number]
            if len(family) == 1:
                own = SequenceSpan(last + 1, prompt.end)
            else:
                own = row.add(completion[:-1], position=len(first))
                parts += [(prompt, own)] if len(own) else []
            predictors.append(np.array([last, *range(own.start, own.end)]))
            targets.append(completion.astype(np.int64))
            cells.append(number * batch.mask.shape[1] + np.arange(len(completion)))
        texts += parts or [(prompt,)]
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate(row.ids).astype(np.int64))[None],
        predictor_index=torch.from_numpy(np.concatenate(predictors)),
        target_ids=torch.from_numpy(np.concatenate(targets)),
        cell_index=torch.from_numpy(np.concatenate(cells)),
        positions=torch.from_numpy(np.concatenate(row.positions))[None],
        texts=tuple(texts),
    )
