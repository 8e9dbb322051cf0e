"""New weights for the generator, in the compute dtype, with their proof: the whole model, an adapter merged into it; or
the adapter alone, where the engine serves adapters.

Version n is the policy after step n. Version 0 is the model as it came and is not written: the generator has it.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Literal

from ftis_node.ipc.durable import remove_leftovers
from ftis_node.ipc.weights import PREFIX, PublishedWeights, WeightProof, WeightStore, prove
from ftis_node.learner.policy import adapter_alone, adapter_merger, own_tensors
from ftis_node.learner.shards import Gathering

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.learner.policy import Policy


Form = Literal["model", "adapter"]


def publish(policy: Policy, store: WeightStore, *, version: int, form: Form = "model") -> PublishedWeights:
    """Write the weights of `version`. Raises OSError where the disk refuses."""
    with gathering_of(policy, form=form) as gathering:
        if form == "adapter":
            _, config = adapter_alone(policy)
            return store.publish_adapter(
                version, gathering.tensors, config, dtype=policy.compute_dtype, change=gathering.take
            )
        return store.publish(version, gathering.tensors, dtype=policy.compute_dtype, change=gathering.take)


def gathering_of(policy: Policy, *, form: Form = "model") -> Gathering:
    """The tensors of a publication, in the compute dtype; whole only as they are taken."""
    if form == "adapter":
        tensors, _ = adapter_alone(policy)
        return Gathering(tensors, dtype=policy.compute_dtype)
    return Gathering(own_tensors(policy), dtype=policy.compute_dtype, change=adapter_merger(policy))


def proof_of(policy: Policy, *, version: int) -> WeightProof:
    """Log-probs of fixed tokens by our own forward pass, the adapter unmerged."""
    return policy.compute(lambda model: prove(model, version=version, vocab_size=policy.tokenizer.vocab_size))


def discard_published(folder: Path) -> None:
    """At a learner's start all that a former life published goes.

    What it wrote last may not have reached the disk, and versions above the checkpoint's were published before their
    own, so from here on those numbers will mean other weights.
    """
    remove_leftovers(folder, PREFIX)
    for path in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(path)
