"""May an offer of weights be taken? Ordered pure rules, before a byte of the file is asked for.

The offer's form and signature were checked when it was opened. What is left: is it from the learner that this node
follows, and could the file be weights of this node's model? The engine then checks the file's names and shapes, and the
proof that it serves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.validation.rules import Refusal

if TYPE_CHECKING:
    from ftis_node.records.weights import WeightsOffer

LARGEST_PARAMETER_BYTES = 4
HEADER_BYTES = 1 << 20  # of a safetensors file: names and shapes, about 100 bytes a tensor


@dataclass(frozen=True, slots=True)
class Follower:
    """A generator's own data. `follows` is a peer id, `started_from` the fingerprint of this node's model.

    `probe_ids` are those by which its engine would be asked; `takes_adapters`: whether it serves adapters alone.
    """

    follows: str
    run_id: str
    tokenizer: str
    started_from: str
    parameters: int
    probe_ids: tuple[int, ...]
    takes_adapters: bool

    @property
    def max_bytes(self) -> int:
        """What a file of this model's weights can have at most, in float32 and with its header."""
        return LARGEST_PARAMETER_BYTES * self.parameters + HEADER_BYTES


def refuse_offer(offer: WeightsOffer, follower: Follower) -> Refusal | None:
    """Why the offer is not taken; None if it may be."""
    if offer.peer_id != follower.follows:
        return Refusal("peer", f"offered by {offer.peer_id}, who is not followed")
    if offer.run_id != follower.run_id:
        return Refusal("run", f"weights of run {offer.run_id}")
    if offer.num_bytes > follower.max_bytes:
        return Refusal("size", f"{offer.num_bytes} bytes for a model that has {follower.max_bytes} at most")
    if offer.tokenizer != follower.tokenizer:
        return Refusal("tokenizer", "the learner's tokenizer is another: start from the same model")
    if offer.probe_ids != follower.probe_ids:
        return Refusal("probe", "the proof is about other tokens than this node would ask for")
    if offer.adapter_config and not follower.takes_adapters:
        return Refusal("adapter", "an adapter alone, which this engine does not serve: merge it (generation.adapters)")
    if offer.adapter_config and offer.started_from != follower.started_from:
        return Refusal("model", f"an adapter for another model than this one ({offer.model})")
    return None
