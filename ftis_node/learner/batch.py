"""Conversion of groups to arrays: one batch per step, divided into micro-batches under a token budget.

A batch is a matrix of completion tokens, `[N, T]`, on which losses are computed. A micro-batch is the input of one
forward pass, in one of two layouts. Its index maps the positions that predict completion tokens to cells of the matrix.

Padded rows have one completion each, for models that accept nothing else. Padding on the right needs no attention mask:
a causal model never attends to later tokens.

A packed row holds several sequences end to end without padding, and a group's prompt only once.

    prompt p1 p2 p3 | a1 a2 | b1 | c1 c2 c3        a, b, c attend to the prompt and themselves, not each other

In an episode the observations are between the sampled tokens, as context. The matrix has the sampled tokens alone.

A completion's last token predicts nothing and is omitted. Whole groups are packed, longest first, each into the first
row with enough space. A group that exceeds a row's budget is divided, and each part contains its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ftis_node.learner.groups import UnpackedGroup, unpack_train_group
from ftis_node.learner.messages import TrainGroup
from ftis_node.records.group import FinishReason

PADDING_ID = 0  # any id works: its outputs are never read


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The N completions of a step, at most T tokens each; all on the CPU.

    prompts, completions    N arrays of token ids (int32); completions have the sampled ones alone
    texts                   N arrays of token ids (int32): the completions, with the observations of an episode
    sampled_at              N arrays (int64): the places of the completion's tokens in its text
    behaviour_logprobs      [N, T] float32, 0 outside the mask and in the rows of `is_text`
    mask                    [N, T] bool
    rewards                 [N] float64
    group_ids               [N] int64, one id per group (one generator's completions of one prompt)
    advantage_ids           [N] int64, one id per advantage key
    sender_ids              [N] int64, one id per sender, 0 for this node's own
    task_ids                [N] int64, one id per task
    weights                 [N] float64, factor of each row's advantage
    senders                 names of the senders by their ids, as the groups give them
    is_own                  [N] bool, signed by this node
    of_own_weights          [N] bool, own, or sampled with this node's weights by a peer that the operator trusts
    policy_versions         [N] int64, this node's version that sampled the first token of the row's group
    policy_versions_newest  [N] int64, this node's version that sampled the last token of the row's group
    is_cut                  [N] bool, without an end token: it reached the token limit, or its node stopped it
    is_text                 [N] bool, sent as text by a peer with another tokenizer: only a mean log-prob is known
    behaviour_means         [N] float64, that mean, over the peer's own tokens; 0 in all other rows
    num_groups              groups, the own ones first counted in `num_own_groups`
    """

    prompts: tuple[NDArray[np.int32], ...]
    completions: tuple[NDArray[np.int32], ...]
    texts: tuple[NDArray[np.int32], ...]
    sampled_at: tuple[NDArray[np.int64], ...]
    behaviour_logprobs: Tensor
    mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    advantage_ids: Tensor
    sender_ids: Tensor
    task_ids: Tensor
    weights: Tensor
    senders: tuple[str, ...]
    is_own: Tensor
    of_own_weights: Tensor
    policy_versions: Tensor
    policy_versions_newest: Tensor
    is_cut: Tensor
    is_text: Tensor
    behaviour_means: Tensor
    num_own_groups: int
    num_foreign_groups: int

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def policy_ids(self) -> Tensor:
        """Return `[N]` int64: the sender ids for loss and advantages, 0 for all rows of this node's weights."""
        return torch.where(self.of_own_weights, 0, self.sender_ids)

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each text with its prompt, `[N]`."""
        return [len(prompt) + len(ids) for prompt, ids in zip(self.prompts, self.texts, strict=True)]

    def only(self, rows: Tensor) -> TrainBatch:
        """Return the completions `rows` `[K]` alone. Senders and the counts of groups stay those of the whole batch."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        chosen: dict[str, Any] = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor)}
        arrays = ("prompts", "completions", "texts", "sampled_at")
        chosen |= {name: tuple(values[name][number] for number in rows.tolist()) for name in arrays}
        return replace(self, **chosen)

    def sampled_by(self, version: int) -> Tensor:
        """Return `[N, T]` bool: tokens that `version` of this node's weights sampled, here or on a trusted peer."""
        by_version = (self.policy_versions == version) & (self.policy_versions_newest == version)
        return (self.of_own_weights & by_version)[:, None] & self.mask


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tokens of one forward pass, and the positions of M completion tokens in it.

    token_ids        [R, C] int64
    predictor_index  [M] int64, positions in the flattened `token_ids` whose output predicts a completion token
    target_ids       [M] int64, that token
    cell_index       [M] int64, that token's cell in the batch's flattened [N, T]
    positions        [R, C] int64, each token's position in its own text; None: its column
    texts            the texts of a packed row (R is 1), each as its ranges of columns in order: a prompt may be part
                     of several; empty if each row is one text
    trained          [K] int64, which of the M tokens may have a gradient in the loss; None: any
    """

    token_ids: Tensor
    predictor_index: Tensor
    target_ids: Tensor
    cell_index: Tensor
    positions: Tensor | None = None
    texts: tuple[tuple[range, ...], ...] = ()
    trained: Tensor | None = None


def make_batch(groups: Sequence[TrainGroup]) -> TrainBatch:
    """Return the batch of these groups. Raises as `unpack_train_group`."""
    return batch_of([unpack_train_group(group) for group in groups])


def batch_of(groups: Sequence[UnpackedGroup]) -> TrainBatch:
    rows = [(number, group) for number, group in enumerate(groups) for _ in range(len(group.tokens))]
    completions = [ids for group in groups for ids in group.tokens.ids_of_each()]
    texts = [text for group in groups for text in group.texts]
    means = [mean for group in groups for mean in group.mean_logprobs or (None,) * len(group.tokens)]
    keys = {key: number for number, key in enumerate(dict.fromkeys(group.sent.advantage_key for group in groups))}
    tasks = {task: number for number, task in enumerate(dict.fromkeys(group.sent.task for group in groups))}
    names = [group.sent.sender or group.sent.group_id for group in groups]
    peers = dict.fromkeys(name for name, group in zip(names, groups, strict=True) if not group.sent.own)
    senders = {name: number for number, name in enumerate(peers, start=1)}
    num_own_groups = sum(group.sent.own for group in groups)
    of_own_weights = [group.sent.own or group.sent.of_own_weights for _, group in rows]
    stop = FinishReason.STOP
    reasons = [one for group in groups for one in group.finish_reasons or (stop,) * len(group.tokens)]
    logprobs = [values for group in groups for values in group.tokens.logprobs_of_each()]
    lengths = torch.tensor(list(map(len, completions)), dtype=torch.int64)
    num_columns = max(map(len, completions), default=0)
    return TrainBatch(
        prompts=tuple(group.prompt_ids for _, group in rows),
        completions=tuple(completions),
        texts=tuple(ids for ids, _ in texts),
        sampled_at=tuple(places for _, places in texts),
        behaviour_logprobs=_padded(logprobs, num_columns=num_columns),
        mask=torch.arange(num_columns) < lengths[:, None],
        rewards=torch.tensor([reward for group in groups for reward in group.sent.rewards], dtype=torch.float64),
        group_ids=torch.tensor([number for number, _ in rows], dtype=torch.int64),
        advantage_ids=torch.tensor([keys[group.sent.advantage_key] for _, group in rows], dtype=torch.int64),
        sender_ids=torch.tensor(
            [0 if group.sent.own else senders[names[number]] for number, group in rows], dtype=torch.int64
        ),
        task_ids=torch.tensor([tasks[group.sent.task] for _, group in rows], dtype=torch.int64),
        weights=torch.tensor([group.sent.weight for _, group in rows], dtype=torch.float64),
        senders=(next((group.sent.sender for group in groups if group.sent.own), ""), *peers),
        is_own=torch.tensor([group.sent.own for _, group in rows], dtype=torch.bool),
        of_own_weights=torch.tensor(of_own_weights, dtype=torch.bool),
        policy_versions=torch.tensor([group.policy_version for _, group in rows], dtype=torch.int64),
        policy_versions_newest=torch.tensor([group.policy_version_newest for _, group in rows], dtype=torch.int64),
        is_cut=torch.tensor([one is not stop for one in reasons], dtype=torch.bool),
        is_text=torch.tensor([mean is not None for mean in means], dtype=torch.bool),
        behaviour_means=torch.tensor([mean or 0.0 for mean in means], dtype=torch.float64),
        num_own_groups=num_own_groups,
        num_foreign_groups=len(groups) - num_own_groups,
    )


def make_micro_batches(batch: TrainBatch, *, max_tokens: int) -> list[MicroBatch]:
    """Divide a batch so that rows times longest row, in tokens, stays within `max_tokens`, unless there is one row.

    The longest rows come first, so that a lack of memory occurs at once.
    """
    lengths = batch.lengths
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    cuts: list[list[int]] = []
    for row in by_length:
        if not cuts or lengths[cuts[-1][0]] * (len(cuts[-1]) + 1) > max_tokens:
            cuts.append([])
        cuts[-1].append(row)
    return [_lay_out(batch, rows, num_columns=lengths[rows[0]]) for rows in cuts]


def _lay_out(batch: TrainBatch, rows: Sequence[int], *, num_columns: int) -> MicroBatch:
    token_ids = np.full((len(rows), num_columns), PADDING_ID, dtype=np.int64)
    predictors, targets, cells = [], [], []
    for line, row in enumerate(rows):
        prompt, text, completion = batch.prompts[row], batch.texts[row], batch.completions[row]
        token_ids[line, : len(prompt) + len(text)] = np.concatenate([prompt, text])
        # The output at a token predicts the next one, so the prompt's last token predicts the first of the completion.
        predictors.append(line * num_columns + len(prompt) - 1 + batch.sampled_at[row])
        targets.append(completion.astype(np.int64))
        cells.append(row * batch.mask.shape[1] + np.arange(len(completion)))
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        predictor_index=torch.from_numpy(np.concatenate(predictors)),
        target_ids=torch.from_numpy(np.concatenate(targets)),
        cell_index=torch.from_numpy(np.concatenate(cells)),
    )


def _padded(rows: Sequence[NDArray[np.float32]], *, num_columns: int) -> Tensor:
    matrix = np.zeros((len(rows), num_columns), dtype=np.float32)
    for line, values in enumerate(rows):
        matrix[line, : len(values)] = values
    return torch.from_numpy(matrix)


def make_packed_micro_batches(batch: TrainBatch, *, max_tokens: int) -> list[MicroBatch]:
    """Return rows of at most `max_tokens` positions. A longer completion with its prompt gets a separate row."""
    groups: dict[int, list[int]] = {}
    for number, group in enumerate(batch.group_ids.tolist()):
        if len(batch.completions[number]):
            groups.setdefault(group, []).append(number)
    families = [part for members in groups.values() for part in _cut(batch, members, max_tokens)]
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
    return [_lay_out_packed(batch, families) for families in rows]


def _cut(batch: TrainBatch, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the rows of one prompt in parts that fit, of about equal length."""
    longest_first = sorted(rows, key=lambda row: (-len(batch.texts[row]), row))
    parts: list[list[int]] = []
    for row in longest_first:
        fitting = next((part for part in parts if _length(batch, [*part, row]) <= max_tokens), None)
        if fitting is None:
            parts.append([row])
        else:
            fitting.append(row)
    return [sorted(part) for part in parts]


def _length(batch: TrainBatch, rows: Sequence[int]) -> int:
    """Return the positions of one prompt and the texts of these completions."""
    return len(batch.prompts[rows[0]]) + sum(len(batch.texts[row]) - 1 for row in rows)


def _lay_out_packed(batch: TrainBatch, families: Sequence[Sequence[int]]) -> MicroBatch:
    ids: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    texts: list[tuple[range, ...]] = []
    predictors, targets, cells = [], [], []

    def add(tokens: NDArray[np.int32], *, position: int) -> range:
        """Append `tokens`, of which the first is at `position` in its text. Returns their columns."""
        start = sum(map(len, ids))
        ids.append(tokens)
        positions.append(np.arange(position, position + len(tokens)))
        return range(start, start + len(tokens))

    for family in families:
        prompt = add(batch.prompts[family[0]], position=0)
        parts = []
        for number in family:
            completion = batch.completions[number]
            own = add(batch.texts[number][:-1], position=len(prompt))
            parts += [(prompt, own)] if len(own) else []
            predictors.append(np.array([prompt[-1], *own])[batch.sampled_at[number]])
            targets.append(completion.astype(np.int64))
            cells.append(number * batch.mask.shape[1] + np.arange(len(completion)))
        texts += parts or [(prompt,)]
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64))[None],
        predictor_index=torch.from_numpy(np.concatenate(predictors)),
        target_ids=torch.from_numpy(np.concatenate(targets)),
        cell_index=torch.from_numpy(np.concatenate(cells)),
        positions=torch.from_numpy(np.concatenate(positions))[None],
        texts=tuple(texts),
    )


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on `device`. The host waits neither for the copy to a GPU nor for the work before it."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def is_free_to_read(device: torch.device) -> bool:
    """Return whether the host reads a value of `device` without a wait. A GPU first computes all that is queued."""
    return device.type == "cpu"
