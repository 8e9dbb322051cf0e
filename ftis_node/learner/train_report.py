"""The report of a step, and the mismatch between engine and learner on the same tokens under the same weights.

The engine reports the log-prob of each token that it samples, and the learner recomputes it. Their difference (another
kernel, number format or softmax, or old weights) enters every ratio that the learner computes.

The KL is estimated by k3 of J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). With samples
from q, and r = p / q, the mean of (r - 1) - log r is an unbiased estimate of KL(q || p). Each of its terms is >= 0.

Generation runs ahead, so a step's groups are mostly a version old. The daemon therefore offers the first group that a
new version sampled, the check group. An idle learner measures it at once, a busy one just before its next update.

*Drift* is KL(start || policy), measured before step 2, 7, 12 and so on. Two groups that the starting model sampled are
its sample: their log-probs are known, so no second model takes memory. The learner keeps them, also in checkpoints. A
run with `optimizer.kl_coef` has KL(policy || start) over the whole batch instead, as part of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import torch
from msgspec import json
from torch import Tensor

from ftis_node.algorithms.importance_weights import TOKEN_LOG_RATIO_LIMIT
from ftis_node.learner.batch import TrainBatch
from ftis_node.learner.groups import UnpackedGroup
from ftis_node.learner.messages import StepReport, TrainGroup
from ftis_node.learner.senders import SenderStats, largest_senders
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.train_step import Gradients, StepOutcome

MAX_RATIO_ERROR = 0.01
NUM_DRIFT_GROUPS = 2
MAX_DRIFT_GROUP_BYTES = 4 << 20  # as JSON: all groups are in `state.json`, of which 16 MiB are read
DRIFT_STEPS = range(2, 1 << 62, 5)  # so that it takes at most a few percent of the time, also of small steps


@dataclass(frozen=True, slots=True)
class Mismatch:
    """KL(engine || learner) in nats a token, and the share of tokens whose ratio differs from 1 by more than 1 %."""

    kl: float
    share: float
    num_tokens: int


def measure_mismatch(learner_logprobs: Tensor, engine_logprobs: Tensor) -> Mismatch | None:
    """Return the mismatch over K sampled tokens, from both log-probs `[K]`; None without tokens, or if not finite."""
    log_ratios = learner_logprobs.double() - engine_logprobs.double()
    if not log_ratios.numel() or not bool(log_ratios.isfinite().all()):
        return None
    log_ratios = log_ratios.clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT)
    errors = torch.expm1(log_ratios)  # r - 1, exact for small values
    return Mismatch(
        kl=float((errors - log_ratios).mean()),
        share=float((errors.abs() > MAX_RATIO_ERROR).double().mean()),
        num_tokens=log_ratios.numel(),
    )


def groups_of_start(groups: Sequence[UnpackedGroup]) -> tuple[TrainGroup, ...]:
    """Return the groups to keep of a step whose policy is the starting model: each small enough for checkpoints."""
    sampled_here = (group.sent for group in groups if group.sent.own or group.sent.of_own_weights)
    small = (each for each in sampled_here if len(json.format(json.encode(each))) <= MAX_DRIFT_GROUP_BYTES)
    return tuple(islice(small, NUM_DRIFT_GROUPS))


def report_of(
    outcome: StepOutcome,
    batch: TrainBatch,
    objective: Objective,
    *,
    step: int,
    version_before: int,
    checked: Mismatch | None,
) -> StepReport:
    """Return the report of step `step` from version `version_before` on; the learner adds what only it knows.

    The mismatch is that of the batch's own tokens of this version, else the check group's (`checked`).
    """
    first = outcome.first
    tokens = batch.sampled_by(version_before)
    mismatch = checked
    if first.refused is None:  # otherwise the matrix is incomplete
        mismatch = measure_mismatch(first.learner_logprobs[tokens], batch.behaviour_logprobs[tokens]) or checked
    figures = {} if first.refused else _answer_figures(first.learner_logprobs, batch, objective)
    return StepReport(
        step=step,
        policy_version=step if outcome.num_updates else version_before,
        loss=first.loss,
        reward_mean=_mean(batch.rewards),
        own_reward_mean=_mean(batch.rewards[batch.is_own]),
        foreign_reward_mean=_mean(batch.rewards[~batch.is_own]),
        kept_fraction=first.metrics.get("kept_fraction", 0.0),
        truncated_fraction=first.metrics.get("truncated_fraction", 0.0),
        mean_kl=first.metrics.get("mean_kl", 0.0),
        grad_norm=first.grad_norm,
        kl_to_start=first.metrics.get("kl_to_start"),
        **figures,
        mismatch_kl=mismatch.kl if mismatch else None,
        mismatch_share=mismatch.share if mismatch else None,
        mismatch_tokens=mismatch.num_tokens if mismatch else 0,
        mismatch_version=version_before if mismatch else None,
        num_updates=outcome.num_updates,
        num_tokens=batch.num_tokens,
        own_groups=batch.num_own_groups,
        foreign_groups=batch.num_foreign_groups,
        by_sender=_by_sender(first, batch, objective),
        skipped=None if outcome.num_updates else outcome.skipped,
        refused=None if outcome.num_updates else outcome.refused,
        unfinished=(outcome.refused or outcome.skipped) if outcome.num_updates else None,
    )


def _answer_figures(learner_logprobs: Tensor, batch: TrainBatch, objective: Objective) -> dict[str, Any]:
    """Return figures of the completions that this node's weights sampled; none without such completions.

    -log p of a sampled token is an unbiased estimate of the entropy at its position.
    """
    mine = batch.of_own_weights
    if not mine.any():
        return {}
    has_signal = objective.advantages(batch, learner_logprobs) != 0
    groups, with_signal = batch.group_ids[mine], batch.group_ids[mine & has_signal]
    return {
        "completion_tokens": _mean(batch.mask.sum(dim=1)[mine].double()),
        "cut_fraction": _mean(batch.is_cut[mine].double()),
        "no_signal_fraction": 1 - len(set(with_signal.tolist())) / len(set(groups.tolist())),
        "entropy": _mean(-batch.behaviour_logprobs[mine[:, None] & batch.mask].double()),
    }


def _by_sender(first: Gradients, batch: TrainBatch, objective: Objective) -> tuple[SenderStats, ...]:
    """Return the senders' statistics; none if the first pass was refused, because its log-probs are incomplete."""
    if first.refused is not None:
        return ()
    columns: dict[str, Sequence[Any]] = {
        "sender": batch.senders,
        "own": [number == 0 for number in range(len(batch.senders))],
    }
    columns |= {name: sums.tolist() for name, sums in objective.sender_sums(first.learner_logprobs, batch).items()}
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    figures = [msgspec.convert(row, SenderStats, strict=False) for row in rows]  # counts become integers
    return largest_senders([each for each in figures if each.groups])


def _mean(values: Tensor) -> float | None:
    """Return the mean. None without values, or if it is not finite, because JSON has no such numbers."""
    return float(values.mean()) if values.numel() and bool(values.isfinite().all()) else None
