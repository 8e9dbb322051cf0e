"""The frozen base of an adapter node on one GPU: the learner computes from the tensors of the generation worker.

Shared memory of the CPU replaces CUDA IPC (`tests/cpu_sharing.py`); the rest of the path is real.
"""

import asyncio
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_rig import LORA, REQUEST, SMALL, make_boot, random_groups

from bench.stubs.random_models import SHAPES, save_random_model
from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import MachineError
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.messages import GenerationBoot
from ftis_node.learner.client import LearnerClient
from ftis_node.workers.liveness import RestartPolicy
from tests.cpu_sharing import REFUSAL_FILE, site_folder
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


def shared_bytes(pid):
    """Return bytes of shared memory files that a process maps: resident, and its share."""
    found = dict.fromkeys(("Rss", "Pss"), 0)
    is_shared = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_shared = "/torch_" in line or "memfd" in line or "/dev/shm" in line
        elif is_shared and (field := re.match(r"(Rss|Pss): +(\d+) kB", line)):
            found[field[1]] += int(field[2]) << 10
    return found


class Pair:
    """A generator with the torch engine, and a learner that uses its base."""

    def __init__(self, tmp_path, **changes):
        self.model = tmp_path / "model"
        save_random_model("12m", self.model, dtype=torch.float32)
        settings = EngineSettings(vocab_size=SHAPES["12m"]["vocab_size"], dtype="float32", device="cpu", lora_rank=4)
        quick = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05))
        environment = {"PYTHONPATH": site_folder(tmp_path / "site"), REFUSAL_FILE: str(tmp_path / "refuse")}
        boot = make_boot(self.model, tmp_path / "home", lora=LORA, publish_as="adapter", **changes)
        self.learner = LearnerClient(
            boot,
            sockets_dir=tmp_path / "l",
            log_path=tmp_path / "learner.log",
            restart_policy=quick,
            environment=environment,
        )
        self.generation = GenerationClient(
            GenerationBoot(model=str(self.model), settings=settings, engine="torch"),
            sockets_dir=tmp_path / "g",
            log_path=tmp_path / "generation.log",
            num_threads=1,
            restart_policy=quick,
            environment=environment,
            borrower=self.learner,
        )
        self.learner.share_base = self.generation.share_base

    async def start(self):
        await asyncio.gather(self.generation.start(), self.learner.start())

    async def stop(self):
        await asyncio.gather(self.generation.stop(), self.learner.stop())


async def test_both(tmp_path):
    pair = Pair(tmp_path, checkpoint_every_steps=100)
    generation, learner = pair.generation, pair.learner
    try:
        await pair.start()
        size = (pair.model / "model.safetensors").stat().st_size
        for step in (1, 2):
            reply = await learner.train(random_groups(seed=step, **SMALL), step=step)
            await generation.update_weights(reply.weights, reply.proof)
        served = await generation.generate(REQUEST)
        print(size, shared_bytes(generation.pid), shared_bytes(learner.pid))
        os.kill(learner.pid, signal.SIGKILL)
        await eventually(lambda: learner.restarts == 1, within_s=60)
        state = await learner.start()
        print(state.step)
        for step in range(state.step + 1, 3):
            reply = await learner.train(random_groups(seed=step, **SMALL), step=step)
        await generation.update_weights(reply.weights, reply.proof)
        again = await generation.generate(REQUEST)
        print(np.array_equal(served.tokens.logprobs, again.tokens.logprobs))
        os.kill(generation.pid, signal.SIGKILL)
        await eventually(lambda: generation.restarts == 1 and learner.restarts == 2, within_s=60)
        await generation.start()
        state = await learner.start()
        print(state.step)
        print(size, shared_bytes(generation.pid), shared_bytes(learner.pid))
    finally:
        await pair.stop()
        print((tmp_path / "learner.log").read_text()[-3000:])
