"""Pure tensor functions of policy optimization: advantages, importance weights, filters, losses.

`group_advantages` turns rewards into advantages, and `policy_loss` turns log-probs into a scalar to minimize. Nothing
in this package holds state, logs, or depends on a model, an optimizer or a network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis_node.algorithms.advantages import group_advantages
    from ftis_node.algorithms.loss import policy_loss

__all__ = ["group_advantages", "policy_loss"]


def __getattr__(name: str) -> Any:
    """Import a function at its first use: the daemon uses only `group_choice` and must not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ftis_node.algorithms import advantages, loss

    return advantages.group_advantages if name == "group_advantages" else loss.policy_loss
