"""Validation of a learner's weights offer: ordered pure rules, applied before any byte of the file is requested.

`open_offer` has already checked the offer's form and signature. These rules check that the followed learner made the
offer, and that the file can be weights of this node's model. Later the engine checks the tensors' names and shapes. It
also compares its log-probs of the probe tokens with those in the offer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.records.peer_messages import WeightsOffer
from ftis_node.validation.rules import Refusal

LARGEST_PARAMETER_BYTES = 4
HEADER_BYTES = 1 << 20  # of a safetensors file: names and shapes, about 100 bytes a tensor


@dataclass(frozen=True, slots=True)
class Follower:
    """Data of the generator that receives the offer.

    `follows` is the learner's peer id, `started_from` the fingerprint of this node's model. `probe_ids` are the tokens
    with which this node checks its engine. `takes_adapters` is true if the engine serves an adapter without a merge.
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
        """Return the maximum size of a file with this model's weights: float32 parameters and the header."""
        return LARGEST_PARAMETER_BYTES * self.parameters + HEADER_BYTES


def refuse_offer(offer: WeightsOffer, follower: Follower) -> Refusal | None:
    if offer.peer_id != follower.follows:
        return Refusal("peer", f"offered by {offer.peer_id}, but this node follows another learner")
    if offer.run_id != follower.run_id:
        return Refusal("run", f"weights of run {offer.run_id}")
    if offer.num_bytes > follower.max_bytes:
        return Refusal("size", f"{offer.num_bytes} bytes for a model that has {follower.max_bytes} at most")
    if offer.tokenizer != follower.tokenizer:
        return Refusal("tokenizer", "the learner has another tokenizer: start from the same model")
    if offer.probe_ids != follower.probe_ids:
        return Refusal("probe", "its probe tokens differ from those of this node")
    if offer.adapter_config and not follower.takes_adapters:
        return Refusal("adapter", "an adapter alone, which this engine does not serve: merge it (generation.adapters)")
    if offer.adapter_config and offer.started_from != follower.started_from:
        return Refusal("model", f"an adapter for another model than this one ({offer.model})")
    return None
