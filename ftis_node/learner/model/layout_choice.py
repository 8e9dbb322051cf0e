"""The choice of a model's layout: packed rows if they give the results of padded rows, measured at its start."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftis_node.learner.data.batch import batch_of, make_micro_batches, make_packed_micro_batches
from ftis_node.learner.data.groups import UnpackedGroup
from ftis_node.learner.distributed.ranks import ALONE
from ftis_node.learner.distributed.sharded_tensors import gradient_of
from ftis_node.learner.model import attention
from ftis_node.records.token_batch import TokenBatch
from ftis_node.workers.weight_store import probe_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ftis_node.learner.data.batch import MicroBatch, TrainBatch
    from ftis_node.learner.distributed.ranks import Ranks
    from ftis_node.learner.model.policy import Policy

log = logging.getLogger(__name__)

MAX_PROBE_TOKENS = 1000
# Root mean square of differences between two layouts, in nats, and relative for gradients. In bfloat16 a trainer
# differs from itself at another chunk size by 0.055 (standard deviation) and by up to 0.656 among 3,916 tokens
# (https://github.com/huggingface/trl/issues/6789).
PACKED_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}
LARGEST = 6  # largest single difference, in multiples of the tolerance: 1.5 nats in bfloat16


def choose_layout(policy: Policy, *, ranks: Ranks = ALONE, open_again: Callable[[], Policy] | None = None) -> Policy:
    """Return `policy` with packed rows if they give the results of padded rows, else `policy` with padded rows.

    Packed rows fail for a model that is recurrent, has special attention, or ignores positions. All of `ranks` take the
    same decision. After an error in a pass a sharded policy cannot be used: `open_again` loads it again.
    """
    batch = _probe_batch(policy)
    before = policy.causal_lm.config._attn_implementation
    expected = _values_and_gradient(policy, make_micro_batches(batch, max_tokens=MAX_PROBE_TOKENS))
    attention.register()
    policy.causal_lm.set_attn_implementation(attention.ATTENTION)
    problem: str | None = None
    packing = replace(policy, packs=True)
    try:
        found = _values_and_gradient(packing, make_packed_micro_batches(batch, max_tokens=MAX_PROBE_TOKENS))
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        problem = str(error)
        if open_again is not None:
            policy = open_again()
    else:
        problem = difference_from(expected, found, dtype=policy.compute_dtype)
    if not ranks.is_any(problem is not None):
        return packing
    log.warning("%s cannot be packed, training is slower: %s", policy.source.name, problem or "another rank reports so")
    policy.causal_lm.set_attn_implementation(before)
    return policy


def difference_from(expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], *, dtype: torch.dtype) -> str | None:
    """Return in words how log-probs `[M]` and a gradient differ by more than rounding; None if they do not."""
    tolerance = PACKED_TOLERANCES[dtype]
    scales = (1.0, 1.0 + float(expected[1].square().mean().sqrt()))
    for what, one, other, scale in zip(("log-probs", "gradient"), found, expected, scales, strict=True):
        errors = (one - other) / scale
        rms, largest = float(errors.square().mean().sqrt()), float(errors.abs().max())
        if not (rms < tolerance and largest < LARGEST * tolerance):
            return f"{what} are off by {rms:.2g} (RMS), {largest:.2g} at most"
    return None


def probe_values(policy: Policy) -> tuple[Tensor, Tensor]:
    """Return log-probs `[M]` of fixed tokens, and a gradient, in the policy's own layout."""
    make = make_packed_micro_batches if policy.packs else make_micro_batches
    return _values_and_gradient(policy, make(_probe_batch(policy), max_tokens=MAX_PROBE_TOKENS))


def _probe_batch(policy: Policy) -> TrainBatch:
    """Return fixed tokens whose lengths fill several buckets: short and long texts, shared prompts."""
    ids = np.asarray(probe_token_ids(policy.tokenizer.vocab_size), dtype="<i4")
    return batch_of([probe_group("long", ids, 40, (72, 31)), probe_group("short", ids, 6, (6, 12))])


def probe_group(name: str, tokens: NDArray[np.int32], num_prompt: int, lengths: Sequence[int]) -> UnpackedGroup:
    """Return a group whose prompt and completions, of these lengths, consist of `tokens`, with log-probs of 0."""
    answers = [np.resize(np.roll(tokens, length), length) for length in lengths]
    batch = TokenBatch.from_parts(answers, [np.zeros(length) for length in lengths])
    return UnpackedGroup(name, name, True, 0, 0, np.resize(tokens, num_prompt), batch, (0.0,) * len(lengths))


def _values_and_gradient(policy: Policy, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
    """Return log-probs in the batch's order, and the gradient of their mean to the smallest trained tensor.

    That is a norm, a bias or an adapter's matrix, mostly of the first layer, so its gradient depends on all attention.
    """
    (micro_batch,) = micro_batches
    smallest = min(policy.trainable().values(), key=lambda parameter: parameter.numel())
    logprobs = policy.logprobs(micro_batch)
    if policy.root is None:
        (gradient,) = torch.autograd.grad(logprobs.mean(), smallest)
    else:
        gradient = gradient_of(logprobs.mean(), smallest, policy.trainable().values())
    order = micro_batch.cell_index.argsort()
    return logprobs.detach().float().cpu()[order], gradient.float().cpu()
