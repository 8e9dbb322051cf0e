"""Text about the use of a peer's completions in training, from its row in `peers --json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

NONE_YET = "no step has taken a group of it since the node's start"


def teaches(row: Mapping[str, Any]) -> str:
    """Return the effective fraction of a peer's completions used in training, in percent; `-` if no step used any."""
    return _percent((row.get("teaching") or {}).get("teaches"))


def teaching_words(row: Mapping[str, Any]) -> list[str]:
    """Return the measurements behind that fraction, one on each line."""
    found = row.get("teaching")
    if not found:
        return [NONE_YET]
    return [
        f"{teaches(row)} of its completions, effectively, over its last {found['steps']} steps",
        f"{found['groups']} groups, {_percent(found['signal'])} of them of unequal rewards",
        f"{found['completions']} completions, {_percent(found['kept'])} kept; "
        f"of the negatives {_percent(found['kept_negatives'])}",
        f"ESS {_percent(found['ess'])}, mean weight {_number(found['weight_mean'])}, "
        f"variance {_number(found['weight_variance'])}, clipped {_percent(found['clipped'])}",
        f"log ratio {_number(found['mean_log_ratio'])} nats a token, KL {_number(found['mean_kl'])}, "
        f"truncated {_percent(found['truncated'])}",
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
