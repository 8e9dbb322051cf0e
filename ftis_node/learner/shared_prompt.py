"""Micro-batches in which the completions of one group share their prompt: a row per group, not per completion.

    prompt p1 p2 p3 | a1 a2 | b1 | c1 c2 c3        one row; a, b, c see the prompt and themselves, not each other

With G completions the prompt goes through the model once and not G times, so short answers to long prompts cost a
fraction. A completion's last token predicts nothing and is left out. The mask is dense, so a row's cost grows with the
square of its length, and with long answers little is saved: then a row per completion (`batch.py`) is faster.
`bench/shared_prompt.py` measures both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ftis_node.learner.batch import PADDING_ID, MicroBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ftis_node.learner.batch import Batch

MAX_COLUMNS = 768
MIN_SAVING = 2  # a row per completion must need at least so many times the positions
PADDING_PART = -1


def make_shared_micro_batches(batch: Batch, *, max_tokens: int) -> list[MicroBatch] | None:
    """As `batch.make_micro_batches`, a row per group; None where a group is too long for that."""
    groups = _rows_by_group(batch)
    widths = [_width(batch, rows) for rows in groups]
    if max(widths, default=0) > min(MAX_COLUMNS, max_tokens):
        return None
    by_width = sorted(range(len(groups)), key=lambda group: (-widths[group], group))
    cuts: list[list[int]] = []
    for group in by_width:
        if not cuts or widths[cuts[-1][0]] * (len(cuts[-1]) + 1) > max_tokens:
            cuts.append([])
        cuts[-1].append(group)
    return [_lay_out(batch, [groups[group] for group in cut], num_columns=widths[cut[0]]) for cut in cuts]


def is_worth_sharing(batch: Batch) -> bool:
    """Whether sharing leaves out so many positions that it pays."""
    num_shared = sum(_width(batch, rows) for rows in _rows_by_group(batch))
    num_apart = sum(len(prompt) + len(ids) for prompt, ids in zip(batch.prompts, batch.completions, strict=True))
    return MIN_SAVING * num_shared <= num_apart


def _rows_by_group(batch: Batch) -> list[list[int]]:
    """Row numbers of the batch, group by group."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def _width(batch: Batch, rows: Sequence[int]) -> int:
    return len(batch.prompts[rows[0]]) + sum(len(batch.completions[row]) - 1 for row in rows)


def _lay_out(batch: Batch, groups: Sequence[Sequence[int]], *, num_columns: int) -> MicroBatch:
    """`[R, C]` tokens, one group a row, and who attends to whom."""
    token_ids = np.full((len(groups), num_columns), PADDING_ID, dtype=np.int64)
    positions = np.zeros((len(groups), num_columns), dtype=np.int64)
    parts = np.full((len(groups), num_columns), PADDING_PART)  # 0 the prompt, 1, 2, ... the completions
    predictors, targets, cells = [], [], []
    for line, rows in enumerate(groups):
        prompt = batch.prompts[rows[0]]
        num_prompt = start = len(prompt)
        token_ids[line, :start], positions[line, :start], parts[line, :start] = prompt, np.arange(start), 0
        for number, row in enumerate(rows, start=1):
            completion = batch.completions[row]
            end = start + len(completion) - 1
            token_ids[line, start:end] = completion[:-1]
            positions[line, start:end] = np.arange(num_prompt, num_prompt + end - start)
            parts[line, start:end] = number
            predictors.append(line * num_columns + np.array([num_prompt - 1, *range(start, end)]))
            targets.append(completion.astype(np.int64))
            cells.append(row * batch.mask.shape[1] + np.arange(len(completion)))
            start = end
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        predictor_index=torch.from_numpy(np.concatenate(predictors)),
        target_ids=torch.from_numpy(np.concatenate(targets)),
        cell_index=torch.from_numpy(np.concatenate(cells)),
        positions=torch.from_numpy(positions),
        attends=_attends(torch.from_numpy(parts)),
    )


def _attends(parts: Tensor) -> Tensor:
    """`[R, C]` part numbers to `[R, C, C]`: what stands before in the same part, and the prompt."""
    is_before = torch.ones(parts.shape[1], parts.shape[1], dtype=torch.bool).tril()
    is_same = parts[:, :, None] == parts[:, None, :]
    sees_prompt = (parts[:, None, :] == 0) & (parts[:, :, None] > 0)
    return (is_same & is_before) | sees_prompt
