"""The engine of an ensemble: the torch engine over several models that sample each token from their mixture.

It has the same interface as the other engines, so the same evaluation works for an ensemble. It serves the models with
which it was opened and takes no new weights. All models and their caches are in memory at once.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ftis_node.algorithms import text_logprobs
from ftis_node.errors import EngineError, MachineError, ModelError, WorkerTaskError
from ftis_node.generation.engines.decode_attention import use_grouped_attention
from ftis_node.generation.engines.mixture_decoder import MixtureDecoder, MixtureWeights
from ftis_node.generation.engines.torch_engine import DEFAULT_MAX_BATCH, TorchEngine
from ftis_node.models import load_causal_lm, pick_device
from ftis_node.telemetry.progress import unwatched
from ftis_node.workers.weights.store import probe_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ftis_node.generation.engines.base import EngineSettings
    from ftis_node.models import ModelSource
    from ftis_node.telemetry.progress import OnProgress

MAX_PREFILL_TOKENS = 2048  # prefill needs the logits of every prompt token, not only of the last


class MixtureEngine(TorchEngine):
    """The engine of `models` with one tokenizer, served as their mixture; see `base.Engine`."""

    name = "mixture"

    def __init__(self, models: Sequence[Any], settings: EngineSettings, weighing: MixtureWeights) -> None:
        if len(models) > 1:
            batch = max(1, (settings.max_batch or DEFAULT_MAX_BATCH) // len(models))
            prefill = min(settings.max_prefill_tokens, MAX_PREFILL_TOKENS)
            settings = msgspec.structs.replace(settings, max_batch=batch, max_prefill_tokens=prefill)
        super().__init__(models[0], settings)
        for model in models[1:]:
            use_grouped_attention(model)
        self._models = tuple(models)
        self._mixture = MixtureDecoder(models, vocab_size=settings.vocab_size, weighing=weighing)
        self._decoder = self._mixture

    def weigh(self, weighing: MixtureWeights) -> None:
        """Use these weights from now on, and restart from the seed. No request may be in flight."""
        assert not self._decoding and not self._waiting
        self._mixture.weighing = weighing
        self._seeds = random.Random(self._settings.seed)

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probs of `token_ids[1:]` under the mixture; see `base.Engine`."""
        if self.is_asleep:
            raise WorkerTaskError("the engine is asleep: wake it first")
        return list(await self._compute(lambda: self._text_logprobs(token_ids)))

    async def load_weights(self, path: Path, version: int, *, is_locked: bool = False) -> dict[str, int]:
        """Raise EngineError: an ensemble keeps its models."""
        raise EngineError("an ensemble cannot load new weights")

    def _text_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        weighing = self._mixture.weighing
        tokens = torch.tensor([probe_logprobs(model, token_ids) for model in self._models], dtype=torch.float64)
        log_prior = torch.tensor(weighing.log_prior, dtype=torch.float64)
        logprobs: list[float] = text_logprobs(tokens, log_prior, learns=weighing.learns).tolist()
        return logprobs


def open_mixture(
    sources: Sequence[ModelSource],
    settings: EngineSettings,
    weighing: MixtureWeights,
    *,
    on_progress: OnProgress = unwatched,
) -> MixtureEngine:
    """Load all models, which blocks for a while. Raises ModelError, MachineError and EngineError."""
    device = pick_device(settings.device)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    models = []
    for source in sources:
        on_progress(None, f"loading {source.name} into the mixture")
        try:
            model = load_causal_lm(source, dtype=dtype, device=settings.device)
        except torch.OutOfMemoryError as error:
            raise MachineError(f"{source.name} does not fit beside the others: name fewer models") from error
        if model._is_stateful:
            raise EngineError(f"the torch engine cannot serve {source.name}: it is a recurrent model")
        width = model.get_output_embeddings().weight.shape[0]
        if width < settings.vocab_size:
            raise ModelError(f"{source.name} has {width} embeddings for the {settings.vocab_size} ids of its tokenizer")
        models.append(model)
    return MixtureEngine(models, settings, weighing)
