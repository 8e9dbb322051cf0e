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

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.learner.policy import Policy


Form = Literal["model", "adapter"]


def publish(policy: Policy, store: WeightStore, *, version: int, form: Form = "model") -> PublishedWeights:
    """Write the weights of `version`. Raises OSError where the disk refuses."""
    if form == "adapter":
        tensors, config = adapter_alone(policy)
        return store.publish_adapter(version, tensors, config, dtype=policy.compute_dtype)
    change = adapter_merger(policy)
    return store.publish(version, own_tensors(policy), dtype=policy.compute_dtype, change=change)


def proof_of(policy: Policy, *, version: int) -> WeightProof:
    """Log-probs of fixed tokens by our own forward pass, the adapter unmerged."""
    return prove(policy.causal_lm, version=version, vocab_size=policy.tokenizer.vocab_size)


def publish_anew(
    policy: Policy, store: WeightStore, folder: Path, *, version: int, form: Form = "model"
) -> PublishedWeights | None:
    """The weights of `version` at a learner's start; None for version 0, which the generator has.

    All that a former life published goes: what it wrote last may not have reached the disk, and versions above this one
    were published before their checkpoint, so from here on those numbers will mean other weights.
    """
    remove_leftovers(folder, PREFIX)
    for path in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(path)
    return publish(policy, store, version=version, form=form) if version else None
