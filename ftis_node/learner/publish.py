"""New weights for the generator: the whole model in the compute dtype, an adapter merged into it, with its proof.

Version n is the policy after step n. Version 0 is the model as it came and is not written: the generator has it.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from ftis_node.ipc.durable import remove_leftovers
from ftis_node.ipc.weights import PREFIX, PublishedWeights, WeightProof, WeightStore, prove
from ftis_node.learner.policy import merged_weights

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.learner.policy import Policy


def publish(policy: Policy, store: WeightStore, *, version: int) -> PublishedWeights:
    """Write the weights of `version`. Raises OSError where the disk refuses."""
    return store.publish(version, merged_weights(policy, policy.compute_dtype))


def proof_of(policy: Policy, *, version: int) -> WeightProof:
    """Log-probs of fixed tokens by our own forward pass, the adapter unmerged."""
    with policy.autocast():
        return prove(policy.causal_lm, version=version, vocab_size=policy.tokenizer.vocab_size)


def published_or_publish(policy: Policy, store: WeightStore, *, version: int) -> PublishedWeights | None:
    """The weights of `version` after a resume: those in the store, else written now; None for version 0."""
    if version == 0:
        return None
    newest = store.newest()
    if newest is not None and newest.version == version:
        return newest
    return publish(policy, store, version=version)


def forget_newer(folder: Path, *, version: int) -> None:
    """Remove versions above `version`, and what a crash left half written.

    They were published by a life that died before its checkpoint: from here on, those numbers will mean other weights.
    """
    remove_leftovers(folder, PREFIX)
    for path in folder.glob(f"{PREFIX}*"):
        if int(path.name.removeprefix(PREFIX)) > version:
            shutil.rmtree(path)
