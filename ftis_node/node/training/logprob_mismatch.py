"""Limits of the log-prob mismatch between engine and learner by dtype, and a warning at each transition.

    dtype      max_kl  max_share
    float32    1e-4    0.01       two float32 passes on a CPU differ by a KL of 1e-13, and no token is off by 1 %
    bfloat16   2e-3    0.9        rounding alone moves a log-prob by 0.003 to 0.013 nats on average, measured on tiny
                                  models: a KL of 1e-5 to 1.3e-4, and 5 to 55 % of tokens off by more than 1 %.
                                  For a 3B model, 0.03 to 0.04 nats: a KL of 5e-4 to 6e-4, 73 to 86 % of tokens, on
                                  64 to 128 tokens

The KL is half the mean square of the log-ratios. A KL of 1e-4 means importance ratios off by 1.4 %, 2e-3 by 6 %.
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
    """Upper limits: KL in nats per token, and the share of tokens whose importance ratio is off by more than 1 %."""

    max_kl: float
    max_share: float


LIMITS = {"float32": MismatchLimits(1e-4, 0.01), "bfloat16": MismatchLimits(2e-3, 0.9)}


def limits_of(section: MismatchSection, *, dtype: str) -> MismatchLimits:
    """Return the limits of the settings; for an unset limit, the limit of `dtype`."""
    usual = LIMITS[dtype]
    return MismatchLimits(
        max_kl=usual.max_kl if section.max_kl is None else section.max_kl,
        max_share=usual.max_share if section.max_share is None else section.max_share,
    )


class MismatchChange(Enum):
    """Transition between two measurements."""

    ROSE = "rose"  # above a limit; the measurement before was below both
    FELL = "fell"  # below both limits again


class MismatchWatch:
    """Detects transitions in a sequence of measurements."""

    def __init__(self, limits: MismatchLimits) -> None:
        self.limits = limits
        self._is_high = False

    def note(self, report: StepReport) -> MismatchChange | None:
        """Return the transition to the mismatch of `report`; None for no transition, or no measurement."""
        if report.mismatch_kl is None or report.mismatch_share is None:
            return None
        is_high = report.mismatch_kl > self.limits.max_kl or report.mismatch_share > self.limits.max_share
        if is_high == self._is_high:
            return None
        self._is_high = is_high
        return MismatchChange.ROSE if is_high else MismatchChange.FELL


def warning_of(report: StepReport, limits: MismatchLimits) -> str:
    """Return a line that explains a mismatch above its limits and gives a remedy."""
    return (
        f"engine and learner disagree about version {report.mismatch_version}: KL {report.mismatch_kl:.2g} "
        f"(limit {limits.max_kl:.2g}), {report.mismatch_share:.1%} of {report.mismatch_tokens} tokens off by more than "
        f"1 % (limit {limits.max_share:.0%}), so every importance ratio is wrong by as much: drop quantisation and "
        "other engine options that change its numbers, or run with dtype = float32; with vLLM also --engine torch"
    )
