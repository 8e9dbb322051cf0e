"""The shuffled order in which a node uses the problems of its task: its own, or the same for all nodes."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

from ftis_node.node.context import NodeContext

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

    def _number(self, kind: str, k: int) -> int:
        text = f"{kind}/{self.seed}/{self.peer_id}/{k}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=2)
def _shuffled(num_items: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_items))
    random.Random(seed).shuffle(order)
    return tuple(order)


def prompt_order(context: NodeContext, *, num_items: int) -> PromptOrder:
    """Return the order of prompts: this node's own ("vertical"), or the same for all nodes ("horizontal")."""
    if context.manifest.step.prompt_sharing == "horizontal":
        return PromptOrder(num_items, seed=0, peer_id=context.manifest.run_id)
    return PromptOrder(num_items, context.settings.seed, context.peer_id)
