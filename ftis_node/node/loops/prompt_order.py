"""Prompt order: the sequence of problems that a node generates for, by seed and peer.

Nodes of a swarm use different orders, so that they rarely generate for the same prompt. A task with a data file is
sampled without replacement in each epoch. If the number of problems is practically unlimited, a hash of k gives the
k-th index. The k-th prompt depends only on k, seed and peer, so a restarted node continues at its position.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

LARGEST_SHUFFLED = 1 << 20


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Order in which a node uses the `num_items` problems of a task."""

    num_items: int
    seed: int
    peer_id: str

    def index(self, k: int) -> int:
        """Return the index of the k-th problem, k = 0, 1, ..."""
        if self.num_items > LARGEST_SHUFFLED:
            return self._number("draw", k) % self.num_items
        epoch, position = divmod(k, self.num_items)
        return _shuffled(self.num_items, self._number("epoch", epoch))[position]

    def draw(self, k: int) -> float:
        """Return a number in [0, 1) for the k-th problem, which decides whether it is skipped."""
        return (self._number("keep", k) >> 11) / 2**53

    def _number(self, kind: str, k: int) -> int:
        text = f"{kind}/{self.seed}/{self.peer_id}/{k}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=2)
def _shuffled(num_items: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_items))
    random.Random(seed).shuffle(order)
    return tuple(order)
