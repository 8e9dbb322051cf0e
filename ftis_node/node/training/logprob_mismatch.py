"""Limits of the mismatch between engine and learner, by number format, and one warning a transition.

    dtype      max_kl  max_share
    float32    1e-4    0.01       two float32 passes differ by a KL of 1e-13 on a CPU, and by no token
    bfloat16   2e-3    0.9        rounding alone moves a log-prob by 0.003 to 0.013 nats on average, measured on tiny
                                  models: a KL of 1e-5 to 1.3e-4, and 5 to 55 % of tokens off by more than 1 %.
                                  Of a 3B model by 0.03 to 0.04: a KL of 5e-4 to 6e-4, 73 to 86 % of 64 to 128 tokens

A KL is half the mean square of the log-ratios: 1e-4 means ratios that are off by 1.4 %, 2e-3 by 6 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.config.workers import MismatchSection
    from ftis_node.learner.messages import StepReport


@dataclass(frozen=True, slots=True)
class MismatchLimits:
    """The largest values that are healthy: KL in nats a token, share of tokens whose ratio is off by more than 1 %."""

    max_kl: float
    max_share: float


LIMITS = {"float32": MismatchLimits(1e-4, 0.01), "bfloat16": MismatchLimits(2e-3, 0.9)}


def limits_of(asked: MismatchSection, *, dtype: str) -> MismatchLimits:
    """Return the node's own limits; for an unset one, the limit of the number format."""
    usual = LIMITS[dtype]
    return MismatchLimits(
        max_kl=usual.max_kl if asked.max_kl is None else asked.max_kl,
        max_share=usual.max_share if asked.max_share is None else asked.max_share,
    )


class MismatchChange(Enum):
    """What a measurement changed."""

    ROSE = "rose"  # above a limit, and the one before was not
    FELL = "fell"  # below both again


class MismatchWatch:
    """Measurements in, transitions out."""

    def __init__(self, limits: MismatchLimits) -> None:
        self.limits = limits
        self._is_high = False

    def note(self, report: StepReport) -> MismatchChange | None:
        """Return what the mismatch of `report` changed; None if nothing changed, or if it has none."""
        if report.mismatch_kl is None or report.mismatch_share is None:
            return None
        is_high = report.mismatch_kl > self.limits.max_kl or report.mismatch_share > self.limits.max_share
        if is_high == self._is_high:
            return None
        self._is_high = is_high
        return MismatchChange.ROSE if is_high else MismatchChange.FELL


def warning_of(report: StepReport, limits: MismatchLimits) -> str:
    """One line that says what a mismatch above its limits means, and what to do."""
    return (
        f"engine and learner disagree about version {report.mismatch_version}: KL {report.mismatch_kl:.2g} "
        f"(limit {limits.max_kl:.2g}), {report.mismatch_share:.1%} of {report.mismatch_tokens} tokens off by more than "
        f"1 % (limit {limits.max_share:.0%}), so every importance ratio is wrong by as much: drop quantisation and "
        "other engine options that change its numbers, or run with dtype = float32; with vLLM also --engine torch"
    )
