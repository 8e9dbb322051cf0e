"""Time that a step waits for its checkpoint: written before the next step begins, and in the background.

    python bench/checkpoint.py [--shape 0.5b] [--steps 4] [--threads 2]

Full training in bfloat16 with float32 masters; a step is one group of 8 completions of 64 tokens. Each of the two
learners is a separate process and writes a checkpoint after each step. `behind_wait_s` and `at_once_wait_s` are the
seconds that a step waited, as the mean of the steps after the first. `write_s` is the time of the last write.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
from pathlib import Path

import torch

from ftis_node.config.step import OptimizerSection
from ftis_node.config.workers import LearnerSection
from ftis_node.learner.checkpoint import checkpoint_manager
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import LearnerBoot
from learner_sides.batch import even_groups, with_flat_logprobs
from stubs.random_models import SHAPES, save_random_model

GROUP_SIZE, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a step waits for its checkpoint.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--steps", type=int, default=4, help="at least 2")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first creates the optimizer's states")
    with tempfile.TemporaryDirectory(dir=".", prefix="checkpoint-bench-") as folder:
        model = Path(folder) / "model"
        parameters = save_random_model(options.shape, model, dtype=torch.bfloat16)
        figures = {"bench": "checkpoint", "shape": options.shape, "parameters": parameters, "steps": options.steps}
        for name, every_steps in (("at_once", 1), ("behind", None)):
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:
                home = Path(folder) / name
                found = pool.apply(_train, (model, home, every_steps, options.steps, options.threads))
            figures |= {f"{name}_{key}": value for key, value in found.items()}
            sys.stdout.write(f"{name}: {found}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(figures) + "\n")


def _train(model: Path, home: Path, every_steps: int | None, steps: int, threads: int) -> dict[str, float]:
    checkpoint_manager.SHARE = 1.0  # no pause between two checkpoints
    learner = Learner(
        LearnerBoot(
            model=str(model),
            model_name="bench",
            run_id="bench",
            checkpoints_dir=str(home / "checkpoints"),
            weights_dir=str(home / "weights"),
            optimizer=OptimizerSection(learning_rate=1e-6),
            dtype="bfloat16",
            device="cpu",
            num_threads=threads,
            settings=LearnerSection(checkpoint_every_steps=every_steps),
        )
    )
    saver = learner.checkpoints.saver
    vocab_size = learner.policy.causal_lm.config.vocab_size
    lengths = [COMPLETION_TOKENS] * GROUP_SIZE
    made = even_groups(num_groups=1, completion_tokens=lengths, prompt_tokens=PROMPT_TOKENS, vocab_size=vocab_size)
    groups = with_flat_logprobs(made, vocab_size)
    waits, durations = [], []
    for step in range(1, steps + 1):
        before = saver.waited_s
        report = learner.train(groups, step=step).report
        if not report.num_updates:
            sys.exit(f"step {step} changed nothing: {report.skipped or report.refused}")
        waits.append(saver.waited_s - before)
        durations.append(report.duration_s)
    learner.checkpoints.save_if_behind()
    return {
        "wait_s": round(sum(waits[1:]) / len(waits[1:]), 3),
        "step_s": round(sum(durations[1:]) / len(durations[1:]), 2),
        "write_s": round(saver.write_s, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


if __name__ == "__main__":
    main()
