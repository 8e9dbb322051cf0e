"""Both workers of a node on one device, without a network: whether the memory plan holds, and how fast each is.

A round is a node's work: generate a step's groups, let the generator sleep if the plan says so, train, sync weights.
Figures go to `note` as soon as they are measured, so an interrupted measurement keeps them. The first round compiles
and fills caches; medians exclude it.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.lab.card.usage import DeviceUse, gib, mean_busy, read_gpu, read_processes, sampled
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.messages import TrainGroup
from ftis_node.memory.placement import WorkerPlacement, arrange, inspect_machine
from ftis_node.memory.plan import plan
from ftis_node.models import load_tokenizer, pick_device, read_shape, resolve_model
from ftis_node.node.startup.worker_boots import generation_boot, learner_boot
from ftis_node.node.worker_settings import dtype_of, serves_adapters
from ftis_node.records.codec import hash_prompt, pack_group
from ftis_node.records.group import CompletionStatus, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.records.token_batch import TokenBatch

PROMPT_TOKENS = 128
NEVER = 100_000  # steps between two checkpoints: an update waits until the one before it is on disk
Note = Callable[..., None]  # takes figures by name
HEADER = {  # of groups that are made here
    "run_id": "0" * 32,
    "sender": Identity.from_seed(bytes(32)).peer_id,
    "number": 1,
    "prompt_ref": PromptRef("synthetic", "train", 0),
    "problem_hash": bytes(16),
    "prompt_hash": bytes(4),
    "sampling": SamplingSettings(),
    "model": "synthetic",
    "tokenizer": "0" * 32,
    "created_at": 0.0,
}


def short_run(completion_tokens: int) -> RunManifest:
    """Return the paper's run with own groups only, in which all completions reach their limit."""
    manifest = load_manifest("gsm8k-ftis")
    sampling = manifest.sampling.model_copy(
        update={
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_completion_tokens": completion_tokens,
            "max_total_tokens": PROMPT_TOKENS + completion_tokens,
        }
    )
    return manifest.model_copy(update={"sampling": sampling})


@dataclass(frozen=True, slots=True)
class Workers:
    """Two started workers with the run and the placement that they follow."""

    generation: GenerationClient
    learner: LearnerClient
    manifest: RunManifest
    placement: WorkerPlacement

    async def one_round(self, number: int, *, num_groups: int) -> dict[str, float]:
        """Generate, train and transfer weights. Return the seconds of each, and tokens per second."""
        sampling, began = self.manifest.sampling, time.monotonic()
        prompts = np.random.default_rng(number).integers(5, 300, (num_groups, PROMPT_TOKENS)).tolist()
        results = await asyncio.gather(
            *(
                sample(self.generation, each, num=sampling.group_size, tokens=sampling.max_completion_tokens)
                for each in prompts
            )
        )
        generated = time.monotonic()
        if self.placement.takes_turns:
            await self.generation.sleep(discard=True)
        groups = [train_group(f"{number}-{at}", *pair) for at, pair in enumerate(zip(prompts, results, strict=True))]
        training = time.monotonic()
        reply = await self.learner.train(groups, step=number)
        trained = time.monotonic()
        if reply.weights is not None:
            await self.generation.update_weights(reply.weights, reply.proof)
        elif self.placement.takes_turns:
            await self.generation.wake()
        num_tokens = sum(result.tokens.num_tokens for result in results)
        return {
            "generate_s": generated - began,
            "step_s": reply.report.duration_s,
            "train_s": trained - training,
            "transfer_s": time.monotonic() - trained,
            "generated_tokens_per_s": num_tokens / (generated - began),
            "learner_tokens_per_s": num_tokens / reply.report.duration_s,
        }


def token_body(
    prompt_ids: Sequence[int],
    tokens: TokenBatch,
    rewards: Sequence[float],
    *,
    versions: tuple[int, int],
    finish_reasons: Sequence[FinishReason] = (),
) -> bytes:
    """Return the body of a group of these tokens, which `versions` sampled: its first and its last token."""
    number = len(tokens)
    packed = Group(
        **HEADER | {"prompt_hash": hash_prompt(prompt_ids)},  # type: ignore[arg-type]
        tokens=tokens,
        finish_reasons=tuple(finish_reasons) or (FinishReason.LENGTH,) * number,
        rewards=tuple(rewards),
        statuses=(CompletionStatus.SCORED,) * number,
        policy_versions=(versions[0],) * number,
        policy_versions_newest=(versions[1],) * number,
    )
    return pack_group(packed)


async def sample(
    client: GenerationClient, prompt: Sequence[int], *, num: int, tokens: int, sampling: SamplingSettings | None = None
) -> GenerationResult:
    """Sample `num` completions of `tokens` tokens, which no end token shortens."""
    request = GenerateRequest(
        prompt_ids=tuple(prompt),
        num_completions=num,
        sampling=sampling or SamplingSettings(),
        max_tokens=tokens,
        eos_ids=frozenset(),
    )
    return await client.generate(request)


def train_group(name: str, prompt: Sequence[int], result: GenerationResult) -> TrainGroup:
    """Return the group of a result in which every second completion is right."""
    rewards = tuple(float(at % 2) for at in range(len(result.tokens)))
    versions = result.policy_version, result.policy_version_newest
    return TrainGroup(
        name,
        name,
        own=True,
        body=token_body(prompt, result.tokens, rewards, versions=versions),
        prompt_ids=np.asarray(prompt, dtype="<i4").tobytes(),
        rewards=rewards,
    )


async def measure_workers(
    settings: NodeSettings,
    manifest: RunManifest,
    home: Home,
    *,
    note: Note,
    rounds: int,
    num_groups: int | None = None,
    vocab_size: int | None = None,
    tries_sleep: bool = False,
) -> None:
    """Start both workers as `join` does and do `rounds` rounds of `num_groups`, by default a step's own groups.

    `vocab_size` is that of the model if its tokenizer has fewer ids. With `tries_sleep` the generator then sleeps and
    wakes once.
    """
    settings = settings.model_copy(
        update={"learner": settings.learner.model_copy(update={"checkpoint_every_steps": NEVER})}
    )
    source, on_gpu = resolve_model(settings.model), pick_device(settings.device) != "cpu"
    settings, machine = inspect_machine(settings)
    one = replace(machine, cards=machine.cards[:1])
    made = plan(read_shape(source), one, settings, manifest)
    placement, adapters = arrange(settings, manifest, source), serves_adapters(settings)
    note(placement=made.placement, planned_gib=gib(made.peak_bytes))
    home.create()
    generating = generation_boot(settings, manifest, source, load_tokenizer(source), placement, adapters=adapters)
    served = msgspec.structs.replace(
        generating.settings,
        vocab_size=vocab_size or generating.settings.vocab_size,
        can_sleep=placement.can_sleep or (tries_sleep and on_gpu),
    )
    learner = LearnerClient(
        learner_boot(settings, manifest, source, home, placement, weights=home.weights, adapters=adapters),
        sockets_dir=home.sockets,
        log_path=home.logs / "learner.log",
    )
    generation = GenerationClient(
        msgspec.structs.replace(generating, settings=served),
        sockets_dir=home.sockets,
        log_path=home.logs / "generation.log",
        proof_tolerance=PROOF_TOLERANCES[dtype_of(settings)],
        free_memory=None if placement.shares_base else learner.give_memory_back,
        write_weights=learner.write_weights,
        borrower=learner if placement.shares_base else None,
    )
    if placement.shares_base:
        learner.share_base = generation.share_base
    workers = Workers(generation, learner, manifest, placement)
    num_groups = num_groups or manifest.step.own_groups
    async with AsyncExitStack() as stack:
        samples = stack.enter_context(sampled(lambda: _use(workers, on_gpu=on_gpu)))
        stack.callback(shutil.rmtree, home.sockets, ignore_errors=True)
        stack.push_async_callback(learner.stop)
        stack.push_async_callback(generation.stop)
        await _start(generation, learner, note)
        began_at, found = time.monotonic(), []
        for number in range(1, rounds + 1):
            found.append(await workers.one_round(number, num_groups=num_groups))
            counted = found[1:] or found
            peak = max((use.used_bytes for _, use in samples), default=0)
            note(
                rounds=number,
                **{name: round(statistics.median(each[name] for each in counted), 3) for name in counted[0]},
                peak_gib=gib(peak),
                peak_to_plan=round(peak / made.peak_bytes, 3),
                busy_share=mean_busy([use for at, use in samples if at >= began_at]),
            )
        if tries_sleep:
            note(**await _sleep_and_wake(generation))


async def _start(generation: GenerationClient, learner: LearnerClient, note: Note) -> None:
    began = time.monotonic()

    async def started(name: str, start: Callable[[], Any]) -> None:
        await start()
        note(**{f"{name}_start_s": round(time.monotonic() - began, 1)})

    await asyncio.gather(started("engine", generation.start), started("learner", learner.start))


async def _sleep_and_wake(generation: GenerationClient) -> dict[str, float]:
    began = time.monotonic()
    await generation.sleep()
    slept = time.monotonic()
    await generation.wake()
    return {"sleep_s": round(slept - began, 3), "wake_s": round(time.monotonic() - slept, 3)}


def _use(workers: Workers, *, on_gpu: bool) -> DeviceUse:
    if on_gpu:
        return read_gpu()
    return read_processes([pid for pid in (workers.generation.pid, workers.learner.pid) if pid is not None])
