"""The engine of an ensemble: the torch engine over several models that sample each token from their mixture.

It serves the models with which it was opened. Each expert has a separate cache over the same rows and columns. An
additional layer holds the evidence: each expert's likelihood of a row's text so far. It has a "head" for each expert
and one number a column: the log-prob of the token that *follows* the column. So it is repeated, trimmed and joined with
the rows, and its sum over the columns is log p_j(text so far).

    forward of all experts -> logits [R, J, V] --(posterior from the sums)--> mixture [R, V] -> one token a row
                                   `---- log-prob of that token, by each expert -> the layer's last column

The posterior is computed at temperature 1, then the mixture is sampled at the row's temperature: the mixture is the
model. A single expert is decoded exactly as by `decode_loop.BatchDecoder`. If the experts' embeddings are padded to
different widths, ids at or above the tokenizer's length are removed from all. If they are equally wide, those ids stay.

Log-probs are in nats. The likelihood of a text is the sum of the log-probs of its tokens after the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from ftis_node.algorithms.mixture import mixture_logprobs, posterior
from ftis_node.errors import ModelError
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.engines.decode_loop import BatchDecoder, DecodeBatch
from ftis_node.generation.engines.kv_cache import GrowingLayer, empty_cache, forward, use_grouped_attention
from ftis_node.generation.engines.torch_engine import DEFAULT_MAX_BATCH, TorchEngine, load_served_model
from ftis_node.models import ModelSource
from ftis_node.telemetry.log import OnProgress, unwatched

MAX_PREFILL_TOKENS = 2048  # prefill needs the logits of every prompt token, not only of the last


MixtureMode: TypeAlias = Literal["posterior", "mean", "answer"]
"""Weights of the experts: by the likelihood of prompt and text so far, equal, or by that of the text alone."""


class MixtureCache:
    """The composite of the experts' caches and their evidence. For `kv_cache` it is one cache with many layers."""

    def __init__(self, configs: Sequence[Any]) -> None:
        self.experts = [empty_cache(config) for config in configs]
        self.evidence = GrowingLayer()

    @property
    def layers(self) -> list[Any]:
        return [layer for cache in self.experts for layer in cache.layers] + [self.evidence]

    def text_logprobs(self) -> Tensor:
        """Return `[J, R]` log p_j(text of the row so far), float64; the first token of a text is given."""
        sums: Tensor = self.evidence.keys.sum(dim=2).squeeze(-1)
        return sums.transpose(0, 1)


class MixtureDecoder(BatchDecoder):
    """The decode loop of `models`, which have one tokenizer of `vocab_size` ids and are on one device."""

    def __init__(self, models: Sequence[Any], *, vocab_size: int, mode: MixtureMode) -> None:
        super().__init__(models[0], vocab_size=vocab_size)
        self._models = tuple(models)
        widths = {model.get_output_embeddings().weight.shape[0] for model in models}
        self._num_logits = vocab_size if len(widths) > 1 else widths.pop()
        self.mode = mode

    @property
    def _learns(self) -> bool:
        return self.mode != "mean" and len(self._models) > 1

    def _empty_cache(self) -> MixtureCache:
        return MixtureCache([model.config for model in self._models])

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: MixtureCache) -> Tensor:
        """Return logits `[R, J, V]` of the last column; the cache grows by the columns of `ids` and their evidence."""
        reads_on = self._learns and self.mode != "answer" and ids.shape[1] > 1
        logits, evidence = [], []
        for model, expert_cache in zip(self._models, cache.experts, strict=True):
            every = forward(model, ids, mask, positions, expert_cache, logits_to_keep=0 if reads_on else 1)
            mine = every[:, :, : self._num_logits]
            logits.append(mine[:, -1])
            if reads_on:
                evidence.append(_next_logprobs(mine, ids, mask))
        if reads_on:
            columns = torch.stack(evidence, dim=1)
        else:
            shape = (ids.shape[0], len(self._models), ids.shape[1])
            columns = torch.zeros(shape, dtype=torch.float64, device=ids.device)
        cache.evidence.update(columns[..., None], columns[..., None])
        return torch.stack(logits, dim=1)

    def _choose(self, logits: Tensor, batch: DecodeBatch, *, num_ids: int) -> Tensor:
        """Sample and record one token for every row, from `[R, J, V]`, and each expert's log-prob of it."""
        if len(self._models) == 1:
            return super()._choose(logits[:, 0], batch, num_ids=num_ids)
        expert_logprobs = torch.log_softmax(logits.float(), dim=-1).transpose(0, 1)
        log_prior = torch.zeros(len(self._models), dtype=torch.float64, device=logits.device)  # uniform
        mixture = mixture_logprobs(expert_logprobs, posterior(log_prior, batch.cache.text_logprobs()))
        ids = super()._choose(mixture, batch, num_ids=num_ids)
        if self._learns:
            chosen = expert_logprobs.gather(-1, ids.expand(len(self._models), -1)[..., None]).squeeze(-1)
            batch.cache.evidence.keys[:, :, -1, 0] = chosen.transpose(0, 1).double()
        return ids


def _next_logprobs(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return `[R, C]` float64: at each column the log-prob of the next id, 0 at padding and in the last column."""
    ahead = logits[:, :-1]
    chosen = ahead.gather(-1, ids[:, 1:, None]).squeeze(-1).float()
    logprobs = (chosen - ahead.float().logsumexp(dim=-1)).double()
    logprobs = logprobs.masked_fill(mask[:, -ids.shape[1] : -1] == 0, 0.0)
    return torch.nn.functional.pad(logprobs, (0, 1))


class MixtureEngine(TorchEngine):
    """The engine of `models` with one tokenizer; see `base.Engine`. Its completions alone are those of the mixture."""

    name = "mixture"

    def __init__(self, models: Sequence[Any], settings: EngineSettings, mode: MixtureMode) -> None:
        if len(models) > 1:
            batch = max(1, (settings.max_batch or DEFAULT_MAX_BATCH) // len(models))
            prefill = min(settings.max_prefill_tokens, MAX_PREFILL_TOKENS)
            settings = msgspec.structs.replace(settings, max_batch=batch, max_prefill_tokens=prefill)
        super().__init__(models[0], settings)
        for model in models[1:]:
            use_grouped_attention(model)
        self._mixture = MixtureDecoder(models, vocab_size=settings.vocab_size, mode=mode)
        self._decoder = self._mixture

    def mix_by(self, mode: MixtureMode) -> None:
        """Use this mode from now on. No request may be in flight."""
        assert not self._decoding and not self._waiting
        self._mixture.mode = mode


def open_mixture(
    sources: Sequence[ModelSource],
    settings: EngineSettings,
    mode: MixtureMode,
    *,
    on_progress: OnProgress = unwatched,
) -> MixtureEngine:
    """Load all models, which blocks for a while. Raises ModelError, MachineError and EngineError."""
    models = []
    for source in sources:
        on_progress(None, f"loading {source.name} into the mixture")
        model = load_served_model(source, settings)
        width = model.get_output_embeddings().weight.shape[0]
        if width < settings.vocab_size:
            raise ModelError(f"{source.name} has {width} embeddings for the {settings.vocab_size} ids of its tokenizer")
        models.append(model)
    return MixtureEngine(models, settings, mode)
