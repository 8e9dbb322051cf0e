"""The frozen base of an adapter node without a GPU: both workers map the model's file, so it is in memory once."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_rig import REQUEST, SMALL, make_boot, random_groups

from bench.stubs.random_models import SHAPES, save_random_model
from ftis_node.backoff import ExponentialBackoff
from ftis_node.config.workers import LoraSection
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines import torch_engine
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.messages import GenerationBoot
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.model.policy_loading import load_policy
from ftis_node.models import resolve_model
from ftis_node.workers.liveness import RestartPolicy
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


def mapped(pid: int | None, path: Path) -> dict[str, int]:
    """Return the bytes of a file that a process maps: resident, its share of them, and private copies of pages."""
    found = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    is_file = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_file = line.endswith(f" {path}")
        elif is_file and (field := re.match(r"(Rss|Pss|Anonymous): +(\d+) kB", line)):
            found[field[1]] += int(field[2]) << 10
    return found


def check_views(causal_lm: Any, file: Path) -> None:
    """Assert that all weights but the adapter's lie in a mapping of the file in this process."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(f" {file}"))
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    base = {name: value for name, value in causal_lm.named_parameters() if ".lora_" not in name}
    copied = [n for n, value in base.items() if not any(start <= value.data_ptr() < end for start, end in ranges)]
    assert base and not copied


async def test_both_workers_hold_the_base_once_through_steps_and_restarts(tmp_path):
    model = tmp_path / "model"
    save_random_model("12m", model, dtype=torch.float32)
    file = model / "model.safetensors"
    settings = EngineSettings(vocab_size=SHAPES["12m"]["vocab_size"], dtype="float32", device="cpu", lora_rank=4)
    quick = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05))
    generation = GenerationClient(
        GenerationBoot(model=str(model), settings=settings, engine="torch"),
        sockets_dir=tmp_path / "g",
        log_path=tmp_path / "generation.log",
        num_threads=1,
        restart_policy=quick,
    )
    boot = make_boot(model, tmp_path / "home", lora=LoraSection(rank=4, alpha=8), publish_as="adapter")
    learner = LearnerClient(boot, sockets_dir=tmp_path / "l", log_path=tmp_path / "learner.log", restart_policy=quick)

    def check_memory():
        for pid in (generation.pid, learner.pid):
            of_worker = mapped(pid, file)
            assert of_worker["Rss"] > 0.9 * file.stat().st_size, "the model computes from the file's pages"
            assert of_worker["Anonymous"] == 0, "no page of the base was copied"
            assert of_worker["Pss"] < 0.6 * file.stat().st_size, "each page counts half for each worker"

    try:
        await asyncio.gather(generation.start(), learner.start())
        for step in (1, 2):
            reply = await learner.train(random_groups(seed=step, **SMALL), step=step)
            assert reply.weights is not None and reply.weights.num_bytes < file.stat().st_size / 10
            await generation.update_weights(reply.weights, reply.proof)
        served = await generation.generate(REQUEST)
        check_memory()

        alone = await torch_engine.open_engine(resolve_model(str(model)), settings, lambda: None)
        check_views(alone._model, file)
        check_views(load_policy(boot).causal_lm, file)
        with torch.no_grad():
            for parameter in alone._model.parameters():
                parameter.data = parameter.data.clone()
        await alone.load_weights(Path(reply.weights.path), 2)
        unshared = await alone.generate(REQUEST)
        await alone.close()
        assert np.array_equal(unshared.tokens.token_ids, served.tokens.token_ids)
        assert np.array_equal(unshared.tokens.logprobs, served.tokens.logprobs), "equal in every bit"

        for client in (generation, learner):
            os.kill(client.pid, signal.SIGKILL)
        await eventually(lambda: generation.restarts == learner.restarts == 1, within_s=60)
        state = await learner.start()
        again = await generation.generate(REQUEST)
        assert (state.step, again.policy_version) == (2, 2)
        assert np.array_equal(again.tokens.logprobs, served.tokens.logprobs)
        check_memory()
    finally:
        await asyncio.gather(generation.stop(), learner.stop())
