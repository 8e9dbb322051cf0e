"""Log-probs of the completion tokens under the model being trained.

The output head is where memory goes: a vocabulary of 150,000 in float32 is 0.6 MB a token. So the decoder runs alone,
only the positions that predict a completion token are taken from its output, and the head is applied to them in chunks
whose logits are thrown away and made again in the backward pass. Log-sum-exp is in float32 whatever the head computes
in. Log-probs are those of the full softmax at the sampling temperature, as generators report them
(docs: the algorithms page, "Log-probs").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from ftis_node.learner.batch import MicroBatch

HEAD_CHUNK_TOKENS = 512  # 0.3 GB of float32 logits at a vocabulary of 150,000


def completion_logprobs(
    causal_lm: Any, micro_batch: MicroBatch, *, temperature: float = 1.0, head_chunk_tokens: int = HEAD_CHUNK_TOKENS
) -> Tensor:
    """Log-probs `[M]`, float32, of `micro_batch.target_ids`, on the model's device and with its gradient.

    `causal_lm` is a transformers model whose logits are its output head applied to its decoder's last hidden state
    (see `policy.check_logits`).
    """
    device = causal_lm.device
    decoder, head = causal_lm.get_decoder(), causal_lm.get_output_embeddings()
    layout = _layout(micro_batch, device)
    hidden = decoder(input_ids=micro_batch.token_ids.to(device), use_cache=False, **layout).last_hidden_state
    predictors = hidden.flatten(0, 1)[micro_batch.predictor_index.to(device)]
    targets = micro_batch.target_ids.to(device)
    chunks = zip(torch.split(predictors, head_chunk_tokens), torch.split(targets, head_chunk_tokens), strict=True)
    return torch.cat(
        [checkpoint(_chunk_logprobs, part, head, ids, temperature, use_reentrant=False) for part, ids in chunks]
    )


def _layout(micro_batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Positions and mask as transformers takes them; nothing where rows are plain texts."""
    if micro_batch.positions is None or micro_batch.attends is None:
        return {}
    return {
        "position_ids": micro_batch.positions.to(device),
        "attention_mask": micro_batch.attends[:, None].to(device),
    }


def _chunk_logprobs(hidden: Tensor, head: Any, target_ids: Tensor, temperature: float) -> Tensor:
    """`[K, H]` and `[K]` to `[K]`."""
    logits = head(hidden).float() / temperature
    logprobs: Tensor = logits.gather(-1, target_ids[:, None]).squeeze(-1) - logits.logsumexp(dim=-1)
    return logprobs
