"""`generate`: vLLM in the generation worker. Its start and memory against the plan, tokens/s, five new versions, sleep,
and how far its log-probs are from the learner's. Engines may start together; measurements take turns.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.messages import GenerationBoot
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.lab.card.both_workers import sample
from ftis_node.lab.card.usage import gib
from ftis_node.learner.batch import batch_of, make_micro_batches
from ftis_node.learner.checkpoint.publication import WeightPublication, proof_of
from ftis_node.learner.model.policy import Policy
from ftis_node.memory.generator import generator_memory
from ftis_node.memory.learner_memory import Workload
from ftis_node.models import read_shape, resolve_model
from ftis_node.records.group import SamplingSettings
from ftis_node.telemetry.terminal_text import GIB
from gpu.cases import Options
from gpu.device import load_policy, model_folder, scale_logits
from learner_sides.batch import memory_folder, of_result
from learner_sides.job import LORA
from process_memory import used_bytes
from stubs.random_models import SHAPES

VERSIONS = 5
PROMPT_TOKENS = 64
LARGE_DIFFERENCE = 0.25  # nats
MEMORY_SHARE = 0.2  # of the card for each of the engines that start together; vLLM demands that it is free
GREEDY = SamplingSettings(temperature=0.0)


class Sizes:
    """Numbers of prompts and tokens, which are small in a small check."""

    def __init__(self, options: Options) -> None:
        self.batches = (4, 8) if options.small else (64, 256, 512)
        self.groups, self.completions = (2, 2) if options.small else (16, 16)
        self.tokens = 12 if options.small else 128
        self.cache_bytes = None if options.device == "cpu" else 8 * GIB


def served(options: Options, *, shape: str, lora: bool, core: str) -> None:
    """Measure one worker: start, memory, tokens/s, versions of the model or an adapter, sleep; for a model the probe.

    The probe: log-probs of the engine's own samples by the learner, under the same weights; logits as large as real
    ones.
    """
    asyncio.run(_served(options, shape, lora, core))


async def _served(options: Options, shape: str, lora: bool, core: str) -> None:
    sizes, device, pid = Sizes(options), options.device, os.getpid()
    options.note(planned_gib=gib(_planned(options, shape, lora)))
    with tempfile.TemporaryDirectory() as folder, memory_folder() as weights:
        began = time.monotonic()
        async with _worker(options, shape, Path(folder), lora=lora, core=core) as client:
            options.note(start_s=round(time.monotonic() - began, 1), allocated_gib=gib(used_bytes(device, pid)))
            with options.measuring():
                for batch in sizes.batches:
                    made = await _tokens_per_s(client, sizes, groups=batch // sizes.completions)
                    options.note(**{f"tokens_per_s_{batch}": made})
                policy = load_policy(options, shape, lora=LORA if lora else None)
                publication = WeightPublication(policy, Path(weights), form="adapter" if lora else "model")
                before = used_bytes(device, pid)
                loads, firsts = [], []
                for version in range(1, VERSIONS + 1):
                    _change(policy)
                    published = publication.publish(version)
                    began = time.monotonic()
                    await client.update_weights(published, proof_of(policy, version=version))
                    loads.append(client.load_s or 0.0)
                    firsts.append(await _first_token(client, began))
                    options.note(load_s=round(median(loads), 4), first_token_s=round(median(firsts), 4))
                options.note(
                    growth_by_reloads_gib=gib(used_bytes(device, pid) - before),
                    new_version_tokens_per_s=await _tokens_per_s(client, sizes, groups=sizes.groups),
                )
                options.note(**await _slept(client, device))
                if not lora:
                    options.note(**await _probe(client, policy, publication, options, shape))


async def _slept(client: GenerationClient, device: str) -> dict[str, Any]:
    """Sleep and wake as a node does. The tokens of a prompt must be the same afterwards."""
    expected = await sample(client, [5, 6, 7], num=1, tokens=8, sampling=GREEDY)
    used, began = used_bytes(device, os.getpid()), time.monotonic()
    await client.sleep()
    slept_s, freed = time.monotonic() - began, used - used_bytes(device, os.getpid())
    began = time.monotonic()
    await client.wake()
    found = await sample(client, [5, 6, 7], num=1, tokens=8, sampling=GREEDY)
    woken_s = time.monotonic() - began
    if not np.array_equal(found.tokens.ids_of_each()[0], expected.tokens.ids_of_each()[0]):
        raise RuntimeError("after sleep and wake the same prompt is answered by other tokens")
    return {"sleep_s": round(slept_s, 3), "wake_s": round(woken_s, 3), "freed_gib": gib(freed)}


async def _probe(
    client: GenerationClient, policy: Policy, publication: WeightPublication, options: Options, shape: str
) -> dict[str, Any]:
    sizes, version = Sizes(options), VERSIONS + 1
    scale_logits(policy.causal_lm, shape)
    await client.update_weights(publication.publish(version), proof_of(policy, version=version))
    prompts = _prompts(sizes.groups)
    results = await asyncio.gather(
        *(sample(client, prompt, num=sizes.completions, tokens=sizes.tokens) for prompt in prompts)
    )
    batch = batch_of(
        [
            of_result(str(number), prompt, result, [0.0] * len(result.tokens))
            for number, (prompt, result) in enumerate(zip(prompts, results, strict=True))
        ]
    )
    differences = []
    with torch.no_grad():
        for part in make_micro_batches(batch, max_tokens=8192):
            theirs = batch.behaviour_logprobs.flatten()[part.cell_index.cpu()]
            differences.append((policy.logprobs(part).float().cpu() - theirs).abs())
    errors = torch.cat(differences)
    return {
        "probe_max": round(float(errors.max()), 4),
        "probe_rms": round(float(errors.square().mean().sqrt()), 4),
        "probe_p99": round(float(errors.quantile(0.99)), 4),
        "share_beyond": round(float((errors > LARGE_DIFFERENCE).float().mean()), 5),
        "num_tokens": len(errors),
    }


@asynccontextmanager
async def _worker(
    options: Options, shape: str, folder: Path, *, lora: bool, core: Any
) -> AsyncIterator[GenerationClient]:
    sizes, model = Sizes(options), str(model_folder(shape, options.device))
    settings = EngineSettings(
        vocab_size=SHAPES[shape]["vocab_size"],
        dtype="bfloat16",
        device=options.device,
        max_batch=sizes.batches[-1],
        engine_core=core,
        max_model_len=PROMPT_TOKENS + sizes.tokens,
        cache_bytes=sizes.cache_bytes,
        memory_share=None if sizes.cache_bytes is None else MEMORY_SHARE,
        lora_rank=LORA.rank if lora else None,
        can_sleep=options.device == "cuda",
    )
    client = GenerationClient(
        GenerationBoot(model=model, settings=settings, engine="vllm" if options.device == "cuda" else "torch"),
        sockets_dir=folder / "s",
        log_path=folder / "generation.log",
        proof_tolerance=PROOF_TOLERANCES["bfloat16"],
    )
    try:
        await client.start()
        yield client
    except Exception as error:
        raise RuntimeError(f"{error}\n{(folder / 'generation.log').read_text()[-1500:]}") from error
    finally:
        await client.stop()


def _planned(options: Options, shape: str, lora: bool) -> int:
    """Return the planned bytes of weights, cache and the rest."""
    sizes, model = Sizes(options), model_folder(shape, options.device)
    settings = NodeSettings(
        model=str(model), lora=lora, dtype="bfloat16", engine="vllm", generation={"max_batch": sizes.batches[-1]}
    )
    workload = Workload.of(settings, load_manifest("gsm8k-ftis"), on_gpu=options.device == "cuda")
    memory = generator_memory(read_shape(resolve_model(str(model))), workload)
    return memory.fixed + (sizes.cache_bytes or 0)


def _change(policy: Policy) -> None:
    """Change the weights, so that every version differs from the one before."""
    with torch.no_grad():
        for value in policy.trainable().values():
            value.add_(1e-3 * torch.randn_like(value))


async def _tokens_per_s(client: GenerationClient, sizes: Sizes, *, groups: int) -> float:
    began = time.monotonic()
    results = await asyncio.gather(
        *(sample(client, prompt, num=sizes.completions, tokens=sizes.tokens) for prompt in _prompts(groups))
    )
    made = sum(result.tokens.num_tokens for result in results)
    return round(made / (time.monotonic() - began), 1)


async def _first_token(client: GenerationClient, began: float) -> float:
    await sample(client, [5, 6, 7], num=1, tokens=1)
    return time.monotonic() - began


def _prompts(number: int) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng().integers(5, 300, (number, PROMPT_TOKENS)).tolist()
    return found
