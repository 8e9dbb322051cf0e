"""Credit of accepted groups: how much of the points for acceptance and use a group earns.

A group earns credit only if its rewards differ and it is the sender's first about its problem. The credit is
proportional to the surprise of its completions, up to `FULL_CREDIT_NATS`. Tokens in runs that earlier completions have
do not count. So groups without a signal, repeated problems and copied answers earn nothing, and short noise little. A
problem is identified by the hash of its messages, because many indices may have one text.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftis_node.swarm.lru import LruDict

FULL_CREDIT_NATS = 20.0
MAX_GROUPS = 1 << 14


class CreditBook:
    """Credit in [0, 1] of the groups that were accepted last, and the problems for which a sender has had credit."""

    def __init__(self) -> None:
        self._credits = LruDict[bytes, float](MAX_GROUPS)
        self._credited = LruDict[tuple[str, bytes], None](MAX_GROUPS)

    def may_earn(self, *, sender: str, problem: bytes, rewards: Sequence[float]) -> bool:
        """Return whether a group earns credit if its completions have surprise."""
        return len(set(rewards)) > 1 and (sender, problem) not in self._credited

    def note(self, group_id: bytes, *, sender: str, problem: bytes, nats: float) -> None:
        """Set the credit of a group that may earn some, and has `nats` of surprise."""
        if nats > 0:
            self._credited[sender, problem] = None
        self._credits[group_id] = min(1.0, nats / FULL_CREDIT_NATS)

    def withdraw(self, group_id: bytes) -> None:
        """Set the credit of a group to 0: a step that uses it now earns its sender nothing."""
        self._credits[group_id] = 0.0

    def of(self, group_id: bytes) -> float:
        """Return the credit of a group; 0 for an unknown one, as after a restart."""
        return self._credits.get(group_id, 0.0)
