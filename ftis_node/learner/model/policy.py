"""The model in training: in full, or a LoRA adapter on a frozen model.

The model and its adapter are held and computed in `dtype`, as engines hold them. If that is bfloat16, trained weights
also have float32 masters (`optimizer.py`).

The model stays in eval mode: two passes over a batch must agree, so dropout is off. Layers whose activations are
recomputed in the backward pass are the exception, since transformers recomputes in training mode only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ftis_node.errors import ModelError
from ftis_node.learner.batch import MicroBatch, TrainBatch, make_micro_batches, make_packed_micro_batches
from ftis_node.learner.messages import HEAD_CHUNK_TOKENS, LearnerBoot
from ftis_node.learner.model.activations import recompute_activations, replace_gated_blocks
from ftis_node.learner.model.engine_base import load_base
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.model.lora import add_adapter, fuse_adapters, initialize_adapter, read_start
from ftis_node.models import ModelSource, PromptTokenizer, load_tokenizer, resolve_model
from ftis_node.models.quantized import num_weights
from ftis_node.workers.weight_store import probe_logprobs, probe_token_ids

Result = TypeVar("Result")
# Nats, on average over the probe. In bfloat16 a logit of 20 is a multiple of 0.125: single log-probs may
# differ by that much between two ways of computing them.
LOGITS_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True, slots=True)
class Policy:
    """The trained model. With LoRA the linear layers of `causal_lm` contain the adapter; `adapted` is peft's wrapper.

    `packs`: it supports packed rows (`choose_layout`). `root` is set if the model is sharded over ranks
    (`policy_loading.py`): weights are gathered only inside.
    """

    source: ModelSource
    tokenizer: PromptTokenizer
    causal_lm: Any
    adapted: Any | None
    compute_dtype: torch.dtype
    temperature: float
    packs: bool = False
    root: Any | None = None
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS
    kernels: str = "plain"

    @property
    def layout(self) -> str:
        """Return the layout of its sequences, in words for the status."""
        return "packed rows" if self.packs else "padded rows"

    def trainable(self) -> dict[str, Parameter]:
        """Return the trained tensors by name; the optimizer moves their masters."""
        return {name: value for name, value in self.causal_lm.named_parameters() if value.requires_grad}

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the model without an adapter; tied weights count once."""
        adapter = self.num_trainable_parameters if self.adapted is not None else 0
        return num_weights(self.causal_lm) - adapter

    @property
    def num_trainable_parameters(self) -> int:
        return sum(value.numel() for value in self.trainable().values())

    def compute(self, work: Callable[[Any], Result]) -> Result:
        """Return `work(causal_lm)`. All code that runs the model calls this, on all ranks at once."""
        return work(self.causal_lm) if self.root is None else self.root(work)

    def micro_batches(self, batch: TrainBatch, max_tokens: int) -> list[MicroBatch]:
        """Return micro-batches in packed rows if the model supports them, else one row per completion."""
        make = make_packed_micro_batches if self.packs else make_micro_batches
        return make(batch, max_tokens=max_tokens)

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Return log-probs `[M]` of a micro-batch's completion tokens."""
        return self.compute(
            lambda model: completion_logprobs(
                model, micro_batch, temperature=self.temperature, head_chunk_tokens=self.head_chunk_tokens
            )
        )


def load_unchecked(boot: LearnerBoot) -> Policy:
    """Return the policy that `boot` describes, without a forward pass. Raises as `load_policy` does."""
    source, tokenizer = find_source(boot)
    start = source if boot.lora is None else source.base  # without an adapter in training, the model's own is merged
    return build_policy(boot, source, tokenizer, load_base(boot, start))


def find_source(boot: LearnerBoot) -> tuple[ModelSource, PromptTokenizer]:
    source = replace(resolve_model(boot.model), name=boot.model_name)
    return source, load_tokenizer(source)


def build_policy(boot: LearnerBoot, source: ModelSource, tokenizer: PromptTokenizer, causal_lm: Any) -> Policy:
    """Return the policy with this model, and its adapter if `boot` sets one. Runs no forward pass."""
    causal_lm.requires_grad_(boot.lora is None)
    adapted = add_adapter(causal_lm, boot.lora, start=source.adapter) if boot.lora else None
    torch.manual_seed(boot.seed)
    if adapted is not None:
        initialize_adapter(causal_lm)
        if source.adapter is not None:
            read_start(adapted, source.adapter)
    if boot.recompute_activations:
        recompute_activations(causal_lm, layers_kept=boot.layers_kept)
    replace_gated_blocks(causal_lm)
    if adapted is not None:
        fuse_adapters(causal_lm)
    return Policy(
        source=source,
        tokenizer=tokenizer,
        causal_lm=causal_lm,
        adapted=adapted,
        compute_dtype=getattr(torch, boot.dtype),
        temperature=boot.sampling.temperature,
        head_chunk_tokens=boot.head_chunk_tokens,
    )


def check_logits(policy: Policy) -> None:
    """Compare our log-probs with the model's own. Raises ModelError if it changes its logits in an unknown way."""
    ids = torch.tensor([probe_token_ids(policy.tokenizer.vocab_size)])
    positions = torch.arange(ids.shape[1] - 1)
    micro_batch = MicroBatch(token_ids=ids, predictor_index=positions, target_ids=ids[0, 1:], cell_index=positions)
    with torch.no_grad():
        ours = policy.compute(lambda model: completion_logprobs(model, micro_batch)).cpu()
        theirs = torch.tensor(policy.compute(lambda model: probe_logprobs(model, ids[0].tolist())))
    difference = (ours - theirs).abs().mean().item()
    if not difference < LOGITS_TOLERANCES[policy.compute_dtype]:
        raise ModelError(
            f"{policy.source.name} changes its logits after the output head in an unknown way (log-probs are off by "
            f"{difference:.2g}): such models cannot be trained here"
        )
