"""The log-prob mismatch between engine and learner: its limits, and the warning when it passes them.

The limits, by dtype:

    dtype      max_kl  max_share
    float32    1e-4    0.01       two float32 passes on a CPU differ by a KL of 1e-13, and no token is off by 1 %
    bfloat16   2e-3    0.9        rounding alone moves a log-prob by 0.003 to 0.013 nats on average, measured on tiny
                                  models: a KL of 1e-5 to 1.3e-4, and 5 to 55 % of tokens off by more than 1 %.
                                  For a 3B model, 0.03 to 0.04 nats: a KL of 5e-4 to 6e-4, 73 to 86 % of tokens, on
                                  64 to 128 tokens

The KL is half the mean square of the log-ratios. A KL of 1e-4 means importance ratios off by 1.4 %, 2e-3 by 6 %.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ftis_node.learner.messages import StepReport
from ftis_node.node.context import NodeContext
from ftis_node.node.worker_settings import dtype_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MismatchLimits:
    """Upper limits: KL in nats per token, and the share of tokens whose importance ratio is off by more than 1 %."""

    max_kl: float
    max_share: float


LIMITS = {"float32": MismatchLimits(1e-4, 0.01), "bfloat16": MismatchLimits(2e-3, 0.9)}


def warning_of(report: StepReport, limits: MismatchLimits) -> str:
    """Return a line that explains a mismatch above its limits and gives a remedy."""
    return (
        f"engine and learner disagree about version {report.mismatch_version}: KL {report.mismatch_kl:.2g} "
        f"(limit {limits.max_kl:.2g}), {report.mismatch_share:.1%} of {report.mismatch_tokens} tokens off by more than "
        f"1 % (limit {limits.max_share:.0%}). Every importance ratio has this error. Remove quantisation and other "
        "engine options that change log-probs, or set dtype = float32. With vLLM, --engine torch is another way."
    )


@dataclass(eq=False, repr=False)
class MismatchMonitor:
    """Notes the measured mismatches of a node, and reports when one passes the limits."""

    context: NodeContext

    def __post_init__(self) -> None:
        self._limits = LIMITS[dtype_of(self.context.settings)]
        self._is_mismatch = False

    def note(self, report: StepReport) -> None:
        """Keep the report of a measurement, and note when it rises above a limit, or falls below both again."""
        if report.mismatch_kl is None or report.mismatch_share is None:
            return
        self.context.counters.mismatch_report = report
        limits = self._limits
        is_mismatch = report.mismatch_kl > limits.max_kl or report.mismatch_share > limits.max_share
        if is_mismatch == self._is_mismatch:
            return
        self._is_mismatch = is_mismatch
        self.context.events.write(
            "mismatch",
            step=report.step,
            change="rose" if is_mismatch else "fell",
            kl=report.mismatch_kl,
            share=report.mismatch_share,
            num_tokens=report.mismatch_tokens,
            version=report.mismatch_version,
        )
        if is_mismatch:
            log.warning("%s", warning_of(report, limits))
        else:
            log.info("engine and learner agree again: KL %.2g", report.mismatch_kl)
