"""Pure tensor functions of policy optimization: advantages, importance weights, filters, losses.

`group_advantages` turns rewards into advantages, and `policy_loss` turns log-probs into a scalar to minimize. Nothing
in this package holds state, logs, or depends on a model, an optimizer or a network.
"""

from __future__ import annotations

from ftis_node.algorithms.advantages import group_advantages
from ftis_node.algorithms.loss import policy_loss

__all__ = ["group_advantages", "policy_loss"]
