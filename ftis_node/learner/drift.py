"""How far the policy is from the starting model, measured on two groups before step 2, 7, 12 and so on.

An adapter's node holds the starting model: it is the same model with the adapter off. The measure is

    KL(policy || start) over groups of this step that this node's weights sampled

A node that trains all weights does not hold the starting model, and a second one would take its memory. But the
starting model sampled the groups of the first step, and its log-probs are known. The learner keeps two of them, also in
checkpoints. The measure is

    KL(start || policy) over groups that the starting model sampled

The second grows faster, because the policy learns to avoid wrong completions that the starting model sampled. A run
with `optimizer.kl_coef` has the first over the whole batch, as part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
import torch
from torch import Tensor

from ftis_node.learner.batch import TrainBatch, make_batch
from ftis_node.learner.groups import UnpackedGroup
from ftis_node.learner.messages import TrainGroup
from ftis_node.learner.step.train_step import Forward
from ftis_node.learner.train_report import measure_mismatch

NUM_GROUPS = 2
MAX_GROUP_BYTES = 4 << 20  # as JSON: all groups are in `state.json`, of which 16 MiB are read
FIRST_STEP, PERIOD = 2, 5  # so that it takes at most a few percent of the time, also of small steps


def groups_of_start(groups: Sequence[UnpackedGroup]) -> tuple[TrainGroup, ...]:
    """Return the groups to keep of a step whose policy is the starting model: each small enough for checkpoints."""
    sampled_here = (group.sent for group in groups if group.sent.own or group.sent.of_own_weights)
    return tuple(islice(filter(_is_small, sampled_here), NUM_GROUPS))


def _is_small(group: TrainGroup) -> bool:
    return len(msgspec.json.format(msgspec.json.encode(group))) <= MAX_GROUP_BYTES


def is_due(step: int) -> bool:
    return (step - FIRST_STEP) % PERIOD == 0


def drift_figures(
    policy: Forward,
    start: Forward | None,
    *,
    batch: TrainBatch,
    start_groups: Sequence[TrainGroup],
    logprobs: Callable[[Forward, TrainBatch], Tensor],
) -> dict[str, float]:
    """Return `kl_to_start` or, without `start`, `kl_from_start`; nothing if there are no such groups.

    `logprobs` returns the log-probs `[N, T]` of a batch under a model.
    """
    if start is None:
        sample = make_batch(start_groups)
    else:
        numbers = sorted(set(batch.group_ids[batch.of_own_weights].tolist()))[:NUM_GROUPS]
        sample = batch.only(torch.isin(batch.group_ids, torch.tensor(numbers, dtype=torch.int64)).nonzero()[:, 0])
    if not sample.completions:
        return {}
    present = logprobs(policy, sample)
    if start is None:
        drift = measure_mismatch(present[sample.mask], sample.behaviour_logprobs[sample.mask])
    else:
        drift = measure_mismatch(logprobs(start, sample)[sample.mask], present[sample.mask])
    name = "kl_from_start" if start is None else "kl_to_start"
    return {name: drift.kl} if drift else {}
