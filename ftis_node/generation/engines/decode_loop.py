"""The decode loop: a batch of rows, one token per row and step; rows join and leave between steps.

A request's prompt is computed once and its cache repeated for its completions. A row leaves as soon as it has ended.
All of this runs in the engine's forward thread; this module does not use asyncio.

An id at or above the tokenizer's length (a padded row of the embedding) is no token. Its probability stays in the
softmax, as it does in every learner's. A completion that samples one ends before it and is marked as aborted. Only the
first token is sampled among real ids alone, because a completion has at least one.

Each row draws by inverse transform from its own uniform number, so a request's tokens do not depend on other rows. The
running sum is in float64: over 150,000 ids the rounding of float32 is as large as the probability of most tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis_node.errors import NonFiniteError
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.engines.kv_cache import empty_cache, forward, join, select_rows
from ftis_node.records.group import Completion, FinishReason, SamplingSettings


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of each row, shape `[R]`: temperature (0: greedy), top_p (1: off), top_k (0: off)."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor

    @classmethod
    def of(cls, settings: Sequence[SamplingSettings], device: torch.device) -> RowSettings:
        return cls(
            temperature=torch.tensor([each.temperature for each in settings], dtype=torch.float32, device=device),
            top_p=torch.tensor([each.top_p for each in settings], dtype=torch.float32, device=device),
            top_k=torch.tensor([each.top_k for each in settings], dtype=torch.int64, device=device),
        )


def choose_tokens(logits: Tensor, settings: RowSettings, uniforms: Tensor, *, num_ids: int) -> tuple[Tensor, Tensor]:
    """Sample one token for each row.

    `logits` `[R, V]`, `uniforms` `[R]` float64 in [0, 1); only ids below `num_ids` are sampled. Returns ids `[R]` int64
    and their log-probs `[R]` float32 under the full softmax over all V at the row's temperature (1 if it is 0).
    """
    is_greedy = settings.temperature <= 0
    scale = torch.where(is_greedy, 1.0, settings.temperature)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    candidates = logprobs[:, :num_ids]
    if bool(is_greedy.all()):
        ids = candidates.argmax(dim=-1)
    else:
        ids = draw(keep_likely(candidates.exp(), settings), uniforms)
        if bool(is_greedy.any()):
            ids = torch.where(is_greedy, candidates.argmax(dim=-1), ids)
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw ids `[R]` from rows of `[R, V]` that need not sum to 1, by inverse transform of `uniforms` `[R]`."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms * cumulative[:, -1]
    # The first id whose running sum exceeds the target: an id of probability 0 adds nothing, so it is never chosen.
    ids = torch.searchsorted(cumulative, targets[:, None], right=True).squeeze(-1)
    return ids.clamp(max=probabilities.shape[-1] - 1)


def keep_likely(probabilities: Tensor, settings: RowSettings) -> Tensor:
    """Return `[R, V]` with everything outside top_k and top_p set to 0; the most likely id of a row always stays.

    top_p keeps the smallest set of the most likely ids whose probabilities reach it, after top_k.
    """
    if bool((settings.top_p >= 1).all()) and bool((settings.top_k <= 0).all()):
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    outside_k = (settings.top_k > 0)[:, None] & (ranks >= settings.top_k[:, None])
    ordered = ordered.masked_fill(outside_k, 0.0)
    share_before = (ordered.cumsum(dim=-1) - ordered) / ordered.sum(dim=-1, keepdim=True)
    outside_p = (settings.top_p < 1)[:, None] & (share_before >= settings.top_p[:, None]) & (ranks > 0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered.masked_fill(outside_p, 0.0))


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """A completion in progress."""

    owner: ActiveRequest
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, token_id: int, logprob: float, *, vocab_size: int) -> None:
        """Append the next token; set the finish reason if it is the last."""
        if token_id >= vocab_size:
            self.finish_reason = FinishReason.ABORT
            return
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.owner.request.is_stopped(self.token_ids):
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) == self.owner.request.max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def completion(self) -> Completion:
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=self.finish_reason or FinishReason.ABORT,
            policy_version=self.owner.policy_version,
            policy_version_newest=self.owner.policy_version,
        )


class ActiveRequest:
    """A request from its prefill to its result, all sampled by the weights of `policy_version`."""

    def __init__(self, request: GenerateRequest, *, seed: int, policy_version: int) -> None:
        self.request = request
        self.policy_version = policy_version
        self.completions = [PartialCompletion(self, index) for index in range(request.num_completions)]
        is_greedy = request.sampling.temperature <= 0
        self._random = None if is_greedy else torch.Generator().manual_seed(seed)

    @property
    def has_ended(self) -> bool:
        return all(partial.finish_reason for partial in self.completions)

    def uniforms(self) -> Tensor:
        """Return one number in [0, 1) for each completion, float64. Ended completions do not affect the sequence.

        Greedy requests need none and get zeros.
        """
        if self._random is None:
            return torch.zeros(len(self.completions), dtype=torch.float64)
        return torch.rand(len(self.completions), generator=self._random, dtype=torch.float64)

    def result(self) -> GenerationResult:
        return GenerationResult.from_completions(tuple(partial.completion() for partial in self.completions))


@dataclass(slots=True)
class DecodeBatch:
    """R rows that are decoded together: `mask` `[R, S]` over the cache, `next_positions` and `last_ids` `[R]`."""

    completions: list[PartialCompletion]
    cache: Any
    mask: Tensor
    next_positions: Tensor
    last_ids: Tensor
    settings: RowSettings

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in the given order."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.mask.device)
        self.completions = [self.completions[row] for row in rows]
        self.mask = select_rows(self.cache, self.mask, index)
        self.next_positions = self.next_positions[index]
        self.last_ids = self.last_ids[index]
        self.settings = row_settings(self.completions, self.mask.device)

    def join(self, other: DecodeBatch) -> None:
        self.completions += other.completions
        self.mask = join(self.cache, self.mask, other.cache, other.mask)
        self.next_positions = torch.cat([self.next_positions, other.next_positions])
        self.last_ids = torch.cat([self.last_ids, other.last_ids])
        self.settings = row_settings(self.completions, self.mask.device)


class BatchDecoder:
    """The decode loop of one model and its batch. `vocab_size` is the tokenizer's length."""

    def __init__(self, model: Any, *, vocab_size: int) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._vocab_size = vocab_size
        self._batch: DecodeBatch | None = None
        self._is_stopped = False
        self.tokens_made = 0

    @property
    def num_rows(self) -> int:
        return 0 if self._batch is None else len(self._batch.completions)

    def advance(self, newcomers: Sequence[ActiveRequest], *, num_steps: int) -> None:
        """Prefill `newcomers` and sample up to `num_steps` tokens for every row.

        Returns early when a row has ended. If `stop` was called, it returns after the forward pass in progress. Raises
        NonFiniteError if the model's logits are not finite.
        """
        with torch.inference_mode():
            if newcomers:
                self._prefill(newcomers)
            for _ in range(num_steps):
                num_rows = self.num_rows
                if num_rows == 0 or self._is_stopped:
                    return
                self._step()
                if self.num_rows < num_rows:
                    return

    def stop(self) -> None:
        """Make this and all later `advance` calls return as soon as possible. Safe from any thread."""
        self._is_stopped = True

    def drop(self, requests: Sequence[ActiveRequest]) -> None:
        if self._batch is not None:
            with torch.inference_mode():
                self._keep(
                    [row for row, partial in enumerate(self._batch.completions) if partial.owner not in requests]
                )

    def clear(self) -> None:
        self._batch = None

    def _prefill(self, newcomers: Sequence[ActiveRequest]) -> None:
        """Compute each prompt once, repeat its row for the request's completions, and sample their first tokens."""
        ids, mask = self._pad_left([active.request.prompt_ids for active in newcomers])
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        cache = self._empty_cache()
        logits = self._forward(ids, mask, positions, cache)
        counts = torch.tensor([len(active.completions) for active in newcomers], device=self._device)
        rows = torch.repeat_interleave(torch.arange(len(newcomers), device=self._device), counts)
        completions = [partial for active in newcomers for partial in active.completions]
        fresh = DecodeBatch(
            completions=completions,
            cache=cache,
            mask=select_rows(cache, mask, rows),
            next_positions=positions[rows, -1] + 1,
            last_ids=rows,  # counts as one step: the first tokens are sampled below
            settings=row_settings(completions, self._device),
        )
        fresh.last_ids = self._choose(logits[rows], fresh, num_ids=self._vocab_size)
        if self._batch is None:
            self._batch = fresh
        else:
            self._batch.join(fresh)
        self._drop_ended()

    def _step(self) -> None:
        batch = self._batch
        assert batch is not None
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.completions), 1)], dim=1)
        logits = self._forward(batch.last_ids[:, None], batch.mask, batch.next_positions[:, None], batch.cache)
        batch.next_positions = batch.next_positions + 1
        batch.last_ids = self._choose(logits, batch, num_ids=logits.shape[-1])
        self._drop_ended()

    def _empty_cache(self) -> Any:
        return empty_cache(self._model.config)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return logits `[R, V]` of the last column; the cache grows by the columns of `ids`."""
        return forward(self._model, ids, mask, positions, cache, logits_to_keep=1)[:, -1]

    def _choose(self, logits: Tensor, batch: DecodeBatch, *, num_ids: int) -> Tensor:
        """Sample and record one token for every row. Returns the ids `[R]`."""
        ids, logprobs = choose_tokens(logits, batch.settings, self._uniforms(batch.completions), num_ids=num_ids)
        if not bool(torch.isfinite(logprobs).all()):
            raise NonFiniteError("the model's logits are not finite: its weights are damaged or have diverged")
        for partial, token_id, logprob in zip(batch.completions, ids.tolist(), logprobs.tolist(), strict=True):
            partial.take(token_id, logprob, vocab_size=self._vocab_size)
        self.tokens_made += len(batch.completions)
        return ids

    def _uniforms(self, completions: Sequence[PartialCompletion]) -> Tensor:
        """Return each row's number from its own request's sequence."""
        parts = [
            active.uniforms()[[partial.index for partial in rows]]
            for active, rows in groupby(completions, key=lambda partial: partial.owner)
        ]
        return torch.cat(parts).to(self._device)

    def _drop_ended(self) -> None:
        assert self._batch is not None
        self._keep([row for row, partial in enumerate(self._batch.completions) if partial.finish_reason is None])

    def _keep(self, rows: list[int]) -> None:
        assert self._batch is not None
        if not rows:
            self._batch = None
        elif len(rows) < len(self._batch.completions):
            self._batch.select(rows)

    def _pad_left(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Return ids and mask `[B, longest]`, both int64; padding is id 0 under mask 0."""
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)


def row_settings(completions: Sequence[PartialCompletion], device: torch.device) -> RowSettings:
    return RowSettings.of([partial.owner.request.sampling for partial in completions], device)
