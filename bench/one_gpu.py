"""Both workers on one GPU: whether the memory plan holds, and whether the GPU is busy.

    python bench/one_gpu.py [--shape 0.5b 3b] [--steps 3] [--lora]

For each shape, with random weights, it prints the plan of `doctor` and runs a few rounds of a node's work. A round
generates a step's groups, lets the generator sleep if the plan says so, trains, and syncs the weights. Meanwhile the
GPU's memory and load are read five times a second. Peak memory is compared with the plan's estimate.

`step_s` is the time of the step in its report. `train_s` also has the messages, publication and proof. No
checkpoint is written before the end: an update waits until the one before it is on disk, which is not the step's time.

Without a GPU the same runs on the CPU with the shape `12m`, and memory is that of the two workers' processes. That
checks this script, not the plan.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.learner.client import LearnerClient
from ftis_node.memory.placement import WorkerPlacement, arrange, inspect_machine
from ftis_node.memory.plan import MemoryPlan, plan
from ftis_node.models import load_tokenizer, read_shape, resolve_model
from ftis_node.node.protocols import dtype_of
from ftis_node.node.startup.factories import generation_boot, learner_boot
from gpu.device import GIB, MIB, ask_driver
from learner_sides.batch import of_result, sample
from stubs.random_models import SHAPES, kept_model, pack_train_group

PROMPT_TOKENS = 128
SAMPLE_EVERY_S = 0.2
NEVER = 100_000  # steps between two checkpoints


def main() -> None:
    """Measure every shape and print the result."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["0.5b", "3b"] if has_gpu else ["12m"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--completion-tokens", type=int, default=512 if has_gpu else 32)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    figures = {}
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            figures[shape] = asyncio.run(measure(shape, Path(folder), options))
        sys.stderr.write(f"{shape}: {figures[shape]}\n")
    device = torch.cuda.get_device_name() if has_gpu else "cpu"
    sys.stdout.write(json.dumps({"bench": "one_gpu", "device": device, "torch": torch.__version__, **figures}) + "\n")


async def measure(shape: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one shape."""
    settings = NodeSettings(model=str(make_model(shape)), lora=options.lora, learner={"checkpoint_every_steps": NEVER})
    manifest = small_run(options.completion_tokens)
    source = resolve_model(settings.model)
    made, arrangement = planned(settings, manifest), arrange(settings, manifest, source)
    home = Home(folder / "home")
    home.create()
    generating = generation_boot(settings, manifest, source, load_tokenizer(source), arrangement)
    # Random weights sample every id of the embedding, not the tokenizer's few.
    served = msgspec.structs.replace(generating.settings, vocab_size=SHAPES[shape]["vocab_size"])
    boot = learner_boot(settings, manifest, source, home, arrangement, weights=home.weights)
    learner = LearnerClient(boot, sockets_dir=home.sockets, log_path=home.logs / "learner.log")
    generation = GenerationClient(
        msgspec.structs.replace(generating, settings=served),
        sockets_dir=home.sockets,
        log_path=home.logs / "generation.log",
        proof_tolerance=PROOF_TOLERANCES[dtype_of(settings)],
        write_weights=learner.write_weights,
    )
    try:
        with sampled(lambda: [generation.pid, learner.pid]) as samples:
            await asyncio.gather(generation.start(), learner.start())
            began = time.monotonic()
            rounds = [
                await one_round(generation, learner, manifest, arrangement, number)
                for number in range(1, options.steps + 1)
            ]
            wall_s = time.monotonic() - began
    finally:
        await asyncio.gather(generation.stop(), learner.stop())
        shutil.rmtree(home.sockets, ignore_errors=True)
    peak, busy = max(used for used, _ in samples), [load for _, load in samples[-int(wall_s / SAMPLE_EVERY_S) :]]
    return {
        "placement": made.placement,
        "planned_gib": round(made.peak_bytes / GIB, 2),
        "peak_gib": round(peak / GIB, 2),
        "peak_to_plan": round(peak / made.peak_bytes, 3),
        "busy_share": round(statistics.mean(busy) / 100, 3) if busy else None,
        **{name: round(statistics.median(each[name] for each in rounds[1:] or rounds), 2) for name in rounds[0]},
    }


def make_model(shape: str) -> Path:
    """Return the folder of a random model. If it is missing, write it, on the GPU if there is one.

    On a CPU one of 3B takes a minute. A separate process does it, because this one must not use memory of the GPU.
    """
    options = {"dtype": torch.bfloat16, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    process = multiprocessing.get_context("spawn").Process(target=kept_model, args=(shape,), kwargs=options)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the model of {shape} was not written (exit code {process.exitcode})")
    return kept_model(shape, **options)


def small_run(completion_tokens: int) -> RunManifest:
    """Return the paper's run with own groups only, in which all completions reach their limit."""
    manifest = load_manifest("gsm8k-ftis")
    total = PROMPT_TOKENS + completion_tokens
    sampling = manifest.sampling.model_copy(
        update={
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_completion_tokens": completion_tokens,
            "max_total_tokens": total,
        }
    )
    return manifest.model_copy(update={"sampling": sampling})


def planned(settings: NodeSettings, manifest: RunManifest) -> MemoryPlan:
    """Return the plan that `doctor` prints."""
    settings, machine = inspect_machine(settings)
    one = replace(machine, cards=machine.cards[:1])
    return plan(read_shape(resolve_model(settings.model)), one, settings, manifest)


async def one_round(
    generation: GenerationClient,
    learner: LearnerClient,
    manifest: RunManifest,
    arrangement: WorkerPlacement,
    number: int,
) -> dict[str, float]:
    """Generate, train and hand over. Return the seconds of each, and tokens per second."""
    began = time.monotonic()
    prompts = np.random.default_rng(number).integers(5, 300, (manifest.step.own_groups, PROMPT_TOKENS)).tolist()
    num, tokens = manifest.sampling.group_size, manifest.sampling.max_completion_tokens
    results = await asyncio.gather(*(sample(generation, prompt, num=num, tokens=tokens) for prompt in prompts))
    generated = time.monotonic()
    if arrangement.takes_turns:
        await generation.sleep(discard=True)
    groups = [
        pack_train_group(of_result(f"{number}-{index}", *pair, [float(at % 2) for at in range(len(pair[1].tokens))]))
        for index, pair in enumerate(zip(prompts, results, strict=True))
    ]  # every second completion is right
    reply = await learner.train(groups, step=number)
    trained = time.monotonic()
    if reply.weights is not None:
        await generation.update_weights(reply.weights, reply.proof)
    elif arrangement.takes_turns:
        await generation.wake()
    num_tokens = sum(result.tokens.num_tokens for result in results)
    return {
        "generate_s": generated - began,
        "step_s": reply.report.duration_s,
        "train_s": trained - generated,
        "hand_over_s": time.monotonic() - trained,
        "generated_tokens_per_s": num_tokens / (generated - began),
        "trained_tokens_per_s": num_tokens / (trained - generated),
    }


@contextmanager
def sampled(pids: Callable[[], list[int | None]]) -> Iterator[list[tuple[int, float]]]:
    """Sample the bytes in use and the load in percent while the block runs."""
    read = read_gpu if torch.cuda.is_available() else lambda: read_processes(pids())
    samples: list[tuple[int, float]] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(SAMPLE_EVERY_S):
            samples.append(read())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield samples
    finally:
        is_over.set()
        watching.join()


def read_gpu() -> tuple[int, float]:
    """Return the values of the first GPU by nvidia-smi, because torch in this process would need GPU memory."""
    used, load = ask_driver("memory.used,utilization.gpu").split(",")
    return int(used) * MIB, float(load)


def read_processes(pids: list[int | None]) -> tuple[int, float]:
    """Return the resident memory of the workers and the machine's load."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss if pid is not None else 0
        except psutil.NoSuchProcess:
            continue
    return total, psutil.cpu_percent()


if __name__ == "__main__":
    main()
