"""Log-probs of the completion tokens under the model being trained.

The output head needs the most memory: a vocabulary of 150,000 in float32 is 0.6 MB a token. So only the positions that
predict a completion token go through it, in chunks, whose logits are recomputed in the backward pass. The gradient
dlp_t / dlogits = onehot(token) - softmax(logits) is explicit, so memory holds one buffer of a chunk's logits. Tokens
with a gradient of zero (filtered, or without advantage) are skipped. Log-sum-exp is in float32 or better. Log-probs are
those of the full softmax at the sampling temperature, as generators report them.

Between the products a GPU runs one kernel in each direction (`head_kernels.py`), if triton is installed. Operation by
operation, as on a CPU, the elementwise work moves three times the bytes.

Some models scale their logits (Granite, Cohere) or bound them by a soft cap (Gemma 2). The configuration gives both.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from ftis_node.errors import first_line
from ftis_node.learner.batch import MicroBatch, is_free_to_read, on_device
from ftis_node.learner.messages import HEAD_CHUNK_TOKENS
from ftis_node.learner.model.attention import AttentionPlan

log = logging.getLogger(__name__)

FUSED_DEVICES = ("cuda",)  # those of `head_kernels`
# Keys of transformers' configurations: divisors and factors of the logits, and their soft caps.
DIVISORS, FACTORS = ("logits_scaling",), ("logit_scale", "lm_head_multiplier")
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True, slots=True)
class LogitsProcessing:
    """The operations between the output head and the softmax.

    Logits z become c tanh(z * scale / c) / temperature with a soft cap c, else z * scale / temperature.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, config: Any) -> LogitsProcessing:
        """Return the processing that a model's configuration names, at temperature 1."""
        text = config.get_text_config(decoder=True)
        divisors = [value for key in DIVISORS if (value := getattr(text, key, None))]
        factors = [value for key in FACTORS if (value := getattr(text, key, None))]
        caps = [value for key in SOFT_CAPS if (value := getattr(text, key, None))]
        return cls(scale=prod(factors) / prod(divisors), soft_cap=min(caps, default=None))

    def apply(self, logits: Tensor, *, in_place: bool = False) -> Tensor:
        """Process logits of any shape. With `in_place` they are overwritten, and there is no gradient."""
        out = logits if in_place else None
        if self.soft_cap is not None:
            bounded = torch.tanh(torch.mul(logits, self.scale / self.soft_cap, out=out), out=out)
            return torch.mul(bounded, self.soft_cap / self.temperature, out=out)
        return logits if self.factor == 1 else torch.mul(logits, self.factor, out=out)

    @property
    def factor(self) -> float:
        return self.scale / self.temperature

    def slope(self, processed: Tensor) -> Tensor | None:
        """Return 1 - tanh^2 from processed logits: their derivative is `factor` times it. None without a soft cap."""
        if self.soft_cap is None:
            return None
        return processed.mul(self.temperature / self.soft_cap).square_().neg_().add_(1)


def completion_logprobs(
    causal_lm: Any,
    micro_batch: MicroBatch,
    *,
    temperature: float = 1.0,
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS,
) -> Tensor:
    """Return log-probs `[M]` of `micro_batch.target_ids`, float32 or float64, on the model's device, with a gradient.

    The logits of `causal_lm` are its output head applied to its decoder's last hidden state, processed as its
    configuration says (`policy.check_logits`).
    """
    device, head = causal_lm.device, causal_lm.get_output_embeddings()
    processing = replace(LogitsProcessing.of(causal_lm.config), temperature=temperature)
    hidden = decode(causal_lm, micro_batch)
    predictors = hidden.flatten(0, 1)[on_device(micro_batch.predictor_index, device)]
    targets = on_device(micro_batch.target_ids, device)
    trained = None if micro_batch.trained is None else on_device(micro_batch.trained, device)
    return head_logprobs(
        head, predictors, targets, processing=processing, chunk_tokens=head_chunk_tokens, trained=trained
    )


def decode(causal_lm: Any, micro_batch: MicroBatch) -> Tensor:
    """Return the decoder's last hidden states `[N, T, H]` of a micro-batch's rows."""
    device, layout = causal_lm.device, {}
    if micro_batch.texts and micro_batch.positions is not None:  # a packed row
        plan = AttentionPlan.of(micro_batch.texts, device)
        layout = {"position_ids": on_device(micro_batch.positions, device), "plan": plan}
    token_ids = on_device(micro_batch.token_ids, device)
    hidden: Tensor = causal_lm.get_decoder()(input_ids=token_ids, use_cache=False, **layout).last_hidden_state
    return hidden


def head_logprobs(
    head: Any,
    hidden: Tensor,
    target_ids: Tensor,
    *,
    processing: LogitsProcessing,
    chunk_tokens: int = HEAD_CHUNK_TOKENS,
    trained: Tensor | None = None,
) -> Tensor:
    """Return log-probs `[M]` of `[M]` token ids under `[M, H]` hidden states.

    Only the tokens `trained` `[K]` may get a gradient; None: any.
    """
    if processing.soft_cap is not None:  # its derivative takes a second buffer of a chunk's logits
        chunk_tokens = max(1, chunk_tokens // 2)
    if type(head) is nn.Linear and getattr(head, "bias", None) is None:
        logprobs: Tensor = HeadLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, target_ids, processing, chunk_tokens, trained
        )
        return logprobs
    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(target_ids, chunk_tokens), strict=True)
    return torch.cat([checkpoint(_any_head, part, head, ids, processing, use_reentrant=False) for part, ids in chunks])


class HeadLogprobs(Function):
    """An autograd function: `[M, H]`, `[V, H]` and `[M]` to `[M]`. It saves the inputs and a log-sum-exp a token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target_ids: Tensor,
        processing: LogitsProcessing,
        chunk_tokens: int,
        trained: Tensor | None,
    ) -> Tensor:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = hidden.new_empty(len(target_ids), dtype=exact)
        logsumexp = torch.empty_like(logprobs)
        for start in range(0, len(target_ids), chunk_tokens):
            at = slice(start, start + chunk_tokens)
            logits = _logits(hidden[at], weight, exact)
            logprobs[at], logsumexp[at] = chosen_and_log_sum(logits, target_ids[at], processing)
            del logits  # before the next chunk allocates its own
        logprobs -= logsumexp
        ctx.save_for_backward(hidden, weight, target_ids, logsumexp, trained)
        ctx.processing, ctx.chunk_tokens = processing, chunk_tokens
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Recompute the logits of tokens with a gradient, chunk by chunk."""
        hidden, weight, target_ids, logsumexp, trained = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        if is_free_to_read(hidden.device):
            rows = gradients[0].nonzero()[:, 0]
        else:
            rows = torch.arange(len(hidden), device=hidden.device) if trained is None else trained
        hidden_gradient = torch.zeros_like(hidden) if needs_hidden else None
        # Sums over chunks are in float32 if the head computes in a narrower type.
        weight_gradient = torch.zeros_like(weight, dtype=logsumexp.dtype) if needs_weight else None
        for chosen in torch.split(rows, ctx.chunk_tokens):
            part = hidden[chosen]
            scores = _logits(part, weight, logsumexp.dtype)
            share = gradients[0][chosen] * ctx.processing.factor
            at = (target_ids[chosen], logsumexp[chosen], share)
            scores = logits_gradient(scores, *at, ctx.processing, weight.dtype)
            if hidden_gradient is not None:
                hidden_gradient[chosen] = scores @ weight
            if weight_gradient is not None:
                _add_product(weight_gradient, scores.T, part)
            del scores
        in_dtype = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, in_dtype, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[K, V]` in `dtype`, owned by the caller; unrounded if the device has products with wider output."""
    if weight.dtype != dtype and has_wide_products(weight.device, weight.dtype):
        return torch.mm(hidden, weight.T, out_dtype=dtype)
    return (hidden @ weight.T).to(dtype)


def chosen_and_log_sum(logits: Tensor, target_ids: Tensor, processing: LogitsProcessing) -> tuple[Tensor, Tensor]:
    """Return the processed logits of `[K]` ids and the log-sum-exp of all, both `[K]`. Overwrites `[K, V]` logits."""
    if (kernels := _fused(logits, processing)) is not None:
        fused: tuple[Tensor, Tensor] = kernels.chosen_and_log_sum(logits, target_ids, processing.factor)
        return fused
    processing.apply(logits, in_place=True)
    return logits.gather(-1, target_ids[:, None])[:, 0], _log_sum_exp(logits)


def logits_gradient(
    logits: Tensor,
    target_ids: Tensor,
    logsumexp: Tensor,
    share: Tensor,
    processing: LogitsProcessing,
    dtype: torch.dtype,
) -> Tensor:
    """Return (onehot - softmax) * share as `dtype`, `[K, V]`. Overwrites `logits` `[K, V]`; all others are `[K]`.

    `share` is the gradient of the log-probs, times `processing.factor`.
    """
    if (kernels := _fused(logits, processing)) is not None:
        fused: Tensor = kernels.logits_gradient(logits, target_ids, logsumexp, share, processing.factor, dtype)
        return fused
    scores = processing.apply(logits, in_place=True)
    slope = processing.slope(scores)
    scores.sub_(logsumexp[:, None]).exp_().mul_(-share[:, None])
    scores.scatter_add_(1, target_ids[:, None], share[:, None])
    if slope is not None:
        scores.mul_(slope)
        del slope
    return scores.to(dtype)


def _fused(logits: Tensor, processing: LogitsProcessing) -> Any:
    """Return the module of fused kernels if they compute this, else None."""
    is_plain = processing.soft_cap is None and logits.dtype == torch.float32
    return _head_kernels(logits.device) if is_plain and logits.device.type in FUSED_DEVICES else None


@cache
def _head_kernels(device: torch.device) -> Any:
    """Return the module of fused kernels; None without triton, or if they fail in a trial."""
    if find_spec("triton") is None:
        return None
    try:
        from ftis_node.learner.model import head_kernels

        head_kernels.check(device)
    except Exception as error:  # a compiler, or another version of a package, may raise anything
        log.warning("the output head runs operation by operation, because its kernels fail: %s", first_line(error))
        return None
    return head_kernels


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Reduce `[K, V]` to `[K]`. Overwrites `logits` to avoid a second buffer of their size."""
    largest = logits.amax(dim=-1, keepdim=True)
    logits.sub_(largest)
    return logits.exp_().sum(dim=-1).log_().add_(largest[:, 0])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total` in place, without a temporary of its size if the device has such a product."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif has_wide_products(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@cache
def has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device multiplies matrices of `dtype` into a float32 output and accumulates in place.

    A trial on 16 x 16 matrices decides: CUDA has such products, a CPU lacks them.
    """
    ones = torch.ones((16, 16), device=device, dtype=dtype)
    total = torch.ones((16, 16), device=device, dtype=torch.float32)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        product = torch.mm(ones, ones, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all() and (product == 16).all())


def _any_head(hidden: Tensor, head: Any, target_ids: Tensor, processing: LogitsProcessing) -> Tensor:
    """Return log-probs `[K]` of `[K, H]` and ids `[K]`, for a head that is not one plain matrix."""
    logits = head(hidden)
    logits = processing.apply(logits if logits.dtype == torch.float64 else logits.float())
    logprobs: Tensor = logits.gather(-1, target_ids[:, None]).squeeze(-1) - logits.logsumexp(dim=-1)
    return logprobs
