"""How to build the workers of a node: from its settings and run to the boot message of each worker."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.generation.engines.base import EngineSettings, prefill_tokens_of
from ftis_node.generation.engines.vllm_options import DEFAULT_MAX_BATCH, check_options
from ftis_node.generation.messages import GenerationBoot
from ftis_node.learner.messages import LearnerBoot
from ftis_node.memory.learner_memory import micro_batch_tokens_of, recomputes
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import ModelSource, PromptTokenizer, pick_device
from ftis_node.node.worker_settings import dtype_of, threads_of
from ftis_node.records.identity import Identity
from ftis_node.workers.weight_store import PROBE_LENGTH

REJECTION_PURPOSE = b"ftis-node/rejection/1\n"
ENGINE_CORE: Literal["auto", "inside", "separate"] = "auto"  # process of vLLM's core: inside the worker on a CPU


def generation_boot(
    settings: NodeSettings,
    manifest: RunManifest,
    source: ModelSource,
    tokenizer: PromptTokenizer,
    arrangement: WorkerPlacement,
    *,
    adapters: bool = False,
) -> GenerationBoot:
    """Return how to build the generation worker. With `adapters` it can serve LoRA adapters of this node's rank.

    Raise ConfigError for engine options that ftis-node sets itself.
    """
    generation = settings.generation
    check_options(generation.engine_options)
    return GenerationBoot(
        model=str(source.path),
        engine="vllm" if adapters and not settings.is_quantized and settings.engine == "auto" else settings.engine,
        settings=EngineSettings(
            vocab_size=tokenizer.vocab_size,
            device=settings.device,
            dtype=dtype_of(settings),
            max_batch=generation.max_batch or None,
            max_prefill_tokens=prefill_tokens_of(generation.max_batch or DEFAULT_MAX_BATCH),
            max_model_len=max(manifest.sampling.max_total_tokens, PROBE_LENGTH + 1),
            is_truncated_sampling=manifest.sampling.is_truncated_sampling,
            engine_core=ENGINE_CORE,
            memory_share=arrangement.memory_share,
            cache_bytes=arrangement.cache_bytes,
            can_sleep=arrangement.can_sleep,
            lora_rank=settings.lora_adapter.rank if adapters else None,
            quantize=settings.quantize,
            options=generation.engine_options,
        ),
    )


def learner_boot(
    settings: NodeSettings,
    manifest: RunManifest,
    source: ModelSource,
    home: Home,
    arrangement: WorkerPlacement,
    *,
    weights: Path,
    adapters: bool = False,
    identity: Identity | None = None,
) -> LearnerBoot:
    """Return how to build the learner worker. It publishes into `weights`; with `adapters`, only its adapter.

    The key of the filter `obrs` is derived from `identity`; None: no groups of peers are trained on.
    """
    is_on_gpu, planned = pick_device(settings.device) != "cpu", arrangement.recompute_activations
    return LearnerBoot(
        model=str(source.path),
        model_name=source.name,
        run_id=manifest.run_id,
        checkpoints_dir=str(home.checkpoints),
        weights_dir=str(weights),
        method=manifest.method,
        sampling=manifest.sampling,
        optimizer=manifest.optimizer,
        settings=settings.learner,
        max_logprob_gap_nats=manifest.sampling.max_logprob_gap_nats,
        micro_batch_tokens=micro_batch_tokens_of(settings, on_gpu=is_on_gpu),
        lora=settings.lora_adapter if settings.lora else None,
        publish_as="adapter" if adapters else "model",
        quantize=settings.quantize,
        copies_base=arrangement.copies_base,
        dtype=dtype_of(settings),
        device=pick_device(settings.device),
        seed=settings.seed,
        rejection_key=0 if identity is None else identity.secret_number(REJECTION_PURPOSE),
        num_threads=threads_of(settings.learner.threads, num_processes=settings.learner.num_ranks),
        takes_turns=arrangement.takes_turns,
        transfer="file" if adapters else arrangement.transfer,
        memory_share=arrangement.learner_share,
        recompute_activations=recomputes(settings, on_gpu=is_on_gpu) if planned is None else planned,
        may_recompute=is_on_gpu and settings.learner.recompute_activations is None and settings.learner.num_ranks == 1,
        head_chunk_tokens=arrangement.head_chunk_tokens,
        layers_kept=arrangement.layers_kept,
    )
