"""What peers say that they have trained on of this node's groups."""

from __future__ import annotations

import msgspec


class ReceiptFigures(msgspec.Struct, frozen=True):
    """What peers have trained on of this node: how many `peers`, on how many `groups` with how many `tokens`.

    They are sums of signed receipts (`swarm/receipts.py`). `recent_peers` and `recent_groups` count since the beginning
    of yesterday (UTC).
    """

    peers: int = 0
    groups: int = 0
    tokens: int = 0
    recent_peers: int = 0
    recent_groups: int = 0
