"""Training statistics of one sender's completions, in one step or several: sums, and the ratios derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

MAX_SENDERS = 256  # entries of a step; one without a name sums the rest, to bound the size of a report
OTHERS = ""


class SenderStats(msgspec.Struct, frozen=True):
    """Sums over one sender's completions, defined in `algorithms/diagnostics.py`. Callers may add them.

    `sender` is a peer id; `own` marks this node.
    """

    sender: str
    own: bool
    groups: int = 0
    groups_with_signal: int = 0
    completions: int = 0
    negatives: int = 0
    kept: int = 0
    kept_negatives: int = 0
    trained: int = 0
    clipped: int = 0
    weight_sum: float = 0.0
    weight_square_sum: float = 0.0
    tokens: int = 0
    measured: int = 0
    measured_tokens: int = 0
    truncated_tokens: int = 0
    log_ratio_sum: float = 0.0
    kl_sum: float = 0.0

    @property
    def ess(self) -> float | None:
        """Return the effective sample size of the trained completions, as a share of their number.

        It is 1 for equal weights, 0 if all weights are 0, and None without trained completions.
        """
        if not self.trained:
            return None
        squares = self.trained * self.weight_square_sum
        return min(1.0, self.weight_sum**2 / squares) if squares else 0.0

    @property
    def ess_share(self) -> float | None:
        """Return the share of trained completions times their ESS."""
        return self.trained * (self.ess or 0.0) / self.completions if self.completions else None

    def shares(self) -> dict[str, float | None]:
        """Return all shares and means by name, each None without values."""
        mean, mean_square = _share(self.weight_sum, self.trained), _share(self.weight_square_sum, self.trained)
        return {
            "kept": _share(self.kept, self.completions),
            "kept_negatives": _share(self.kept_negatives, self.negatives),
            "signal": _share(self.groups_with_signal, self.groups),
            "ess": self.ess,
            "effective": self.ess_share,
            "weight_mean": mean,
            "weight_variance": None if mean is None or mean_square is None else max(0.0, mean_square - mean**2),
            "clipped": _share(self.clipped, self.trained),
            "truncated": _share(self.truncated_tokens, self.measured_tokens),
            "mean_log_ratio": _share(self.log_ratio_sum, self.measured_tokens),
            "mean_kl": _share(self.kl_sum, self.measured),
        }


SUMS = tuple(name for name in SenderStats.__struct_fields__ if name not in ("sender", "own"))


def add_up(figures: Iterable[SenderStats]) -> SenderStats:
    """Return the sum of several entries, without a name."""
    entries = list(figures)
    sums = {name: sum(getattr(each, name) for each in entries) for name in SUMS}
    return SenderStats(OTHERS, own=False, **sums)


def largest_senders(figures: Sequence[SenderStats]) -> tuple[SenderStats, ...]:
    """Return this node and the peers with most groups, at most MAX_SENDERS. One entry without a name sums the rest."""
    if len(figures) <= MAX_SENDERS:
        return tuple(figures)
    ordered = sorted(figures, key=lambda each: (not each.own, -each.groups))
    return (*ordered[: MAX_SENDERS - 1], add_up(ordered[MAX_SENDERS - 1 :]))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
