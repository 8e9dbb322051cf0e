"""Micro-batches in which the completions of one group share their prompt: a row per group, not per completion.

    prompt p1 p2 p3 | a1 a2 | b1 | c1 c2 c3        one row; a, b, c see the prompt and themselves, not each other

With G completions the prompt goes through the model once and not G times, so short answers to long prompts cost a
fraction. A completion's last token predicts nothing and is left out. The mask is dense, so a row's cost grows with the
square of its length: long groups are better laid out one completion a row (`batch.py`), and `MAX_COLUMNS` is the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ftis_node.learner.batch import PADDING_ID, MicroBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ftis_node.learner.batch import Batch

MAX_COLUMNS = 768


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
    attends = np.tile(np.eye(num_columns, dtype=bool), (len(groups), 1, 1))  # padding sees itself: no empty softmax
    predictors, targets, cells = [], [], []
    for line, rows in enumerate(groups):
        prompt = batch.prompts[rows[0]]
        start = len(prompt)
        token_ids[line, :start] = prompt
        positions[line, :start] = np.arange(start)
        attends[line, :start, :start] = _causal(start)
        for row in rows:
            completion = batch.completions[row]
            end = start + len(completion) - 1
            token_ids[line, start:end] = completion[:-1]
            positions[line, start:end] = len(prompt) + np.arange(end - start)
            attends[line, start:end, : len(prompt)] = True
            attends[line, start:end, start:end] = _causal(end - start)
            first = line * num_columns
            predictors.append(first + np.concatenate([[len(prompt) - 1], np.arange(start, end)]))
            targets.append(completion.astype(np.int64))
            cells.append(row * batch.mask.shape[1] + np.arange(len(completion)))
            start = end
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        predictor_index=torch.from_numpy(np.concatenate(predictors)),
        target_ids=torch.from_numpy(np.concatenate(targets)),
        cell_index=torch.from_numpy(np.concatenate(cells)),
        positions=torch.from_numpy(positions),
        attends=torch.from_numpy(attends),
    )


def _causal(length: int) -> NDArray[np.bool_]:
    return np.tril(np.ones((length, length), dtype=bool))
