"""`base`: whether the learner of an adapter computes from vLLM's own base on one GPU, and what that saves.

One engine stays. A learner with its own base does a step, and then one that maps the engine's base does the same step.
Then the learner is killed, and then the generator. On the CPU the torch engine and shared memory take the places of
vLLM and CUDA IPC (`tests/cpu_sharing.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftis_node.config.workers import LearnerSection, LoraSection
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.messages import GenerationBoot
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.lab.card.both_workers import sample
from ftis_node.lab.card.usage import gib, read_gpu, read_processes
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.messages import LearnerBoot, TrainGroup
from ftis_node.models import resolve_model
from ftis_node.telemetry.terminal_text import GIB
from ftis_node.workers.weight_store import WeightProof
from gpu.cases import Options
from gpu.device import model_folder
from learner_sides.batch import memory_folder, of_result
from stubs.random_models import SHAPES, pack_train_group
from tests.cpu_sharing import site_folder

LORA = LoraSection(rank=16, alpha=16)
PROMPT, GROUPS, COMPLETIONS, TOKENS = tuple(range(5, 69)), 2, 4, 64
MEMORY_SHARE = 0.3  # of the card, which vLLM demands
LEAST_SAVED = 0.9  # of the base
NEVER = 100_000  # steps between two checkpoints: only the end of a process writes one
POLL_S, RESTART_LIMIT_S = 0.2, 240.0


@dataclass
class Workers:
    """An engine that stays, and one learner after the other beside it."""

    options: Options
    shape: str
    folder: Path
    weights: Path

    def __post_init__(self) -> None:
        on_gpu = self.options.device == "cuda"
        self._model = str(model_folder(self.shape, self.options.device))
        paths = {"PYTHONPATH": f"{site_folder(self.folder / 'site')}:{os.environ.get('PYTHONPATH', '')}"}
        self._environment = {} if on_gpu else paths
        self.learner = self._learner("own")
        settings = EngineSettings(
            vocab_size=SHAPES[self.shape]["vocab_size"],
            dtype="bfloat16",
            device=self.options.device,
            max_batch=GROUPS * COMPLETIONS,
            max_model_len=len(PROMPT) + TOKENS,
            cache_bytes=GIB if on_gpu else None,
            memory_share=MEMORY_SHARE if on_gpu else None,
            lora_rank=LORA.rank,
        )
        self.generation = GenerationClient(
            GenerationBoot(model=self._model, settings=settings, engine="vllm" if on_gpu else "torch"),
            sockets_dir=self.folder / "g",
            log_path=self.folder / "generation.log",
            proof_tolerance=PROOF_TOLERANCES["bfloat16"],
            environment=self._environment,
            borrower=self,
        )

    async def renew(self) -> None:
        await self.learner.renew()

    async def stop(self) -> None:
        await self.learner.stop()

    def _learner(self, name: str) -> LearnerClient:
        boot = LearnerBoot(
            model=self._model,
            model_name=self.shape,
            run_id="gpu-check",
            checkpoints_dir=str(self.folder / name / "checkpoints"),
            weights_dir=str(self.weights / name),
            settings=LearnerSection(kernels="plain", checkpoint_every_steps=NEVER),
            lora=LORA,
            publish_as="adapter",
            dtype="bfloat16",
            device=self.options.device,
        )
        return LearnerClient(
            boot, sockets_dir=self.folder / name, log_path=self.folder / f"{name}.log", environment=self._environment
        )

    async def share(self) -> None:
        """Replace the learner by one that maps the engine's base."""
        await self.learner.stop()
        self.learner = self._learner("mapped")
        self.learner.share_base = self.generation.share_base

    async def groups(self) -> list[TrainGroup]:
        """Sample the groups of a step, in which every second completion is right."""
        results = [await sample(self.generation, PROMPT, num=COMPLETIONS, tokens=TOKENS) for _ in range(GROUPS)]
        rewards = [float(number % 2) for number in range(COMPLETIONS)]
        return [pack_train_group(of_result(str(at), PROMPT, each, rewards)) for at, each in enumerate(results)]

    def used_bytes(self) -> int:
        if self.options.device == "cuda":
            return read_gpu().used_bytes
        return read_processes([pid for pid in (self.generation.pid, self.learner.pid) if pid is not None]).used_bytes

    async def killed(self, *names: str) -> float:
        """Kill the first of these workers. Return the seconds until all of them have started again."""
        clients, began = [getattr(self, name) for name in names], time.monotonic()
        goals = [client.restarts + 1 for client in clients]
        os.kill(clients[0].pid, signal.SIGKILL)
        while [client.restarts for client in clients] != goals:
            if time.monotonic() > began + RESTART_LIMIT_S:
                raise RuntimeError(f"{' and '.join(names)} did not start again within {RESTART_LIMIT_S:.0f} s")
            await asyncio.sleep(POLL_S)
        for client in clients:
            await client.supervisor.wait_ready()
        return round(time.monotonic() - began, 1)


def one_base(options: Options, *, shape: str) -> None:
    """Raise RuntimeError if the GPU holds the base twice, or if log-probs on the two bases differ in a bit."""
    with tempfile.TemporaryDirectory() as folder, memory_folder() as weights:
        asyncio.run(_one_base(Workers(options, shape, Path(folder), Path(weights)), options.note))


async def _one_base(workers: Workers, note: Any) -> None:
    generation, began, is_on_gpu = workers.generation, time.monotonic(), workers.options.device == "cuda"
    base_bytes = sum(path.stat().st_size for path in resolve_model(workers._model).weights_files)
    await generation.start()
    note(base_gib=gib(base_bytes), engine_start_s=round(time.monotonic() - began, 1))
    try:
        groups, before, used, starts, replies = await workers.groups(), workers.used_bytes(), [], [], []
        for name in ("own", "mapped"):
            began = time.monotonic()
            starts.append((await workers.learner.start()).proof)
            used.append(workers.used_bytes() - before)
            note(**{f"{name}_start_s": round(time.monotonic() - began, 1), f"{name}_gib": gib(used[-1])})
            replies.append(await workers.learner.train(groups, step=1))
            if name == "own":
                await workers.share()
        saved, difference = round((used[0] - used[1]) / base_bytes, 3), _difference(*starts)
        own, mapped = (reply.proof for reply in replies)
        norms = [reply.report.grad_norm for reply in replies]
        note(saved_share_of_base=saved if is_on_gpu else None, start_difference=difference)
        note(step_difference=_difference(own, mapped), gradient_norms=norms)
        await generation.update_weights(replies[1].weights, mapped)
        await workers.learner.save()
        learner_s = await workers.killed("learner")
        note(learner_restart_s=learner_s, learner_restart_difference=await _restarted(workers, mapped))
        generator_s = await workers.killed("generation", "learner")
        note(generator_restart_s=generator_s, generator_restart_difference=await _restarted(workers, mapped))
        note(growth_by_restarts_gib=gib(workers.used_bytes() - before - used[1]), version=generation.policy_version)
    finally:
        await generation.stop()
    if difference or (is_on_gpu and saved < LEAST_SAVED):
        raise RuntimeError(f"a learner on the engine's base saves {saved:.2f} of it; log-probs differ by {difference}")


async def _restarted(workers: Workers, proof: WeightProof | None) -> float:
    return _difference((await workers.learner.start()).proof, proof)


def _difference(one: WeightProof | None, other: WeightProof | None) -> float:
    """Return the largest difference of the probe's log-probs, in nats; 0: they are equal in every bit."""
    assert one is not None and other is not None
    return float(np.abs(np.subtract(one.logprobs, other.logprobs)).max())
