"""The frozen starting model, for the KL term against it.

Under a LoRA adapter it is the same weights with the adapter off. In full training a frozen copy in the compute dtype is
loaded from the model's folder, never from a checkpoint. Its log-probs are computed once a step, without a gradient, on
the learner's micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import torch

from ftis_node.learner.distributed.ranks import ALONE, RankGroup
from ftis_node.learner.model.policy_loading import load_sharded_policy
from ftis_node.models import load_causal_lm

if TYPE_CHECKING:
    from torch import Tensor

    from ftis_node.learner.data.batch import MicroBatch
    from ftis_node.learner.distributed.ranks import Ranks
    from ftis_node.learner.messages import LearnerBoot
    from ftis_node.learner.model.policy import Policy
    from ftis_node.learner.step.train_step import Forward


def load_reference(policy: Policy, boot: LearnerBoot, ranks: Ranks = ALONE) -> Forward:
    """Return a function of a micro-batch: the starting model's log-probs `[M]` of its completion tokens.

    `policy` is the learner's, built from `boot`; a copy is sharded over `ranks` in the same way. Raises ModelError or
    MachineError if it cannot be loaded.
    """
    if policy.adapted is not None:
        return _without_adapter(policy)
    if isinstance(ranks, RankGroup):
        untrained = msgspec.structs.replace(boot, recompute_activations=False)
        frozen = load_sharded_policy(untrained, policy.source, policy.tokenizer, ranks, trains=False)
    else:
        causal_lm = load_causal_lm(policy.source, dtype=boot.dtype, device=boot.device)
        frozen = replace(policy, causal_lm=causal_lm)
    frozen.causal_lm.requires_grad_(False)
    attention = policy.causal_lm.config._attn_implementation
    if frozen.causal_lm.config._attn_implementation != attention:  # because it receives the learner's micro-batches
        frozen.causal_lm.set_attn_implementation(attention)
    alone = replace(policy, causal_lm=frozen.causal_lm, root=frozen.root, entropies=None)
    return torch.no_grad()(alone.logprobs)


def _without_adapter(policy: Policy) -> Forward:
    adapted = policy.adapted
    assert adapted is not None

    @torch.no_grad()
    def logprobs(micro_batch: MicroBatch) -> Tensor:
        with adapted.disable_adapter():
            return policy.logprobs(micro_batch)

    return logprobs
