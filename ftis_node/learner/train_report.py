"""Construction of a step's report from its outcome and its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.learner.messages import StepReport
from ftis_node.learner.senders import largest_senders, sender_stats
from ftis_node.learner.step.mismatch import measure_mismatch

if TYPE_CHECKING:
    from torch import Tensor

    from ftis_node.learner.data.batch import TrainBatch
    from ftis_node.learner.senders import SenderStats
    from ftis_node.learner.step.mismatch import Mismatch
    from ftis_node.learner.step.objective import Objective
    from ftis_node.learner.step.train_step import Gradients, StepOutcome


def report_of(
    outcome: StepOutcome,
    batch: TrainBatch,
    objective: Objective,
    *,
    understated: tuple[str, ...],
    step: int,
    version_before: int,
    learning_rate: float,
    checked: Mismatch | None,
    entropy: float | None,
    agreement: tuple[dict[str, float], float | None],
    duration_s: float,
    micro_batch_tokens: int,
    out_of_memory: int,
) -> StepReport:
    """Return the report of step `step`; `version_before` is the policy version that the step started from.

    The mismatch is that of the batch's own tokens of this version. Without such tokens it is the check group's
    (`checked`).
    """
    first = outcome.first
    tokens = batch.sampled_by(version_before)
    mismatch = checked
    if first.refused is None:  # otherwise the matrix is incomplete
        mismatch = measure_mismatch(first.learner_logprobs[tokens], batch.behaviour_logprobs[tokens]) or checked
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
        learning_rate=learning_rate,
        kl_to_start=first.metrics.get("kl_to_start"),
        entropy=entropy,
        mismatch_kl=mismatch.kl if mismatch else None,
        mismatch_share=mismatch.share if mismatch else None,
        mismatch_tokens=mismatch.num_tokens if mismatch else 0,
        mismatch_version=version_before if mismatch else None,
        num_updates=outcome.num_updates,
        num_tokens=batch.num_tokens,
        duration_s=duration_s,
        tokens_per_s=batch.num_tokens / duration_s if duration_s > 0 else 0.0,
        micro_batch_tokens=micro_batch_tokens,
        out_of_memory=out_of_memory,
        own_groups=batch.num_own_groups,
        foreign_groups=batch.num_foreign_groups,
        understated=understated,
        by_sender=_by_sender(outcome.first, batch, objective),
        agreement=agreement[0],
        own_agreement=agreement[1],
        skipped=outcome.skipped,
        refused=outcome.refused,
    )


def _by_sender(first: Gradients, batch: TrainBatch, objective: Objective) -> tuple[SenderStats, ...]:
    """Return the senders' statistics; none if the first pass was refused, because its log-probs are incomplete."""
    if first.refused is not None:
        return ()
    columns = {name: sums.tolist() for name, sums in objective.sender_sums(first.learner_logprobs, batch).items()}
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    numbered = enumerate(zip(batch.senders, rows, strict=True))
    figures = [sender_stats(name, number == 0, row) for number, (name, row) in numbered]
    return largest_senders([each for each in figures if each.groups])


def _mean(values: Tensor) -> float | None:
    """Return the mean. None without values, or if it is not finite, because JSON has no such numbers."""
    return float(values.mean()) if values.numel() and bool(values.isfinite().all()) else None
