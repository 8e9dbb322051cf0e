"""What it saves to put a group's prompt through the model once: seconds a step, against a row for every completion.

Steps of 32 groups of 8 completions with a tiny model of size m, for a few shapes of prompt and completion. Both layouts
run in turn in the same process; the first step of each is not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ftis_node.lab.tiny import make_tiny
from ftis_node.learner.core import Learner
from ftis_node.learner.messages import LearnerBoot, TrainCompletion, TrainGroup

NUM_GROUPS, GROUP_SIZE = 32, 8
SHAPES = {"arithmetic": (14, 3), "long_prompt": (120, 16), "long_answer": (14, 64)}  # tokens of prompt and completion
STEPS = 4
UNTRAINED = 0.001  # of the usual training: only the shape counts


def main() -> None:
    """Runs all shapes and prints the result."""
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny("m", Path(folder) / "model", scale=UNTRAINED)
        for name, (num_prompt, num_completion) in SHAPES.items():
            learner = Learner(boot(Path(folder), name))
            groups = [group(number, num_prompt, num_completion) for number in range(NUM_GROUPS)]
            shared = seconds_a_step(learner, groups, packs=True)
            padded = seconds_a_step(learner, groups, packs=False)
            figures[f"{name}_s"] = round(shared, 4)
            figures[f"{name}_ratio"] = round(padded / shared, 2)
            sys.stderr.write(f"{name}: {shared:.3f} s a step, {padded / shared:.2f} x faster than a row a completion\n")
    sys.stdout.write(json.dumps({"bench": "shared_prompt", "torch": torch.__version__, **figures}) + "\n")


def seconds_a_step(learner: Learner, groups: list[TrainGroup], *, packs: bool) -> float:
    """The best of a few steps; the machine is shared."""
    learner.policy = replace(learner.policy, packs=packs)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        learner.train(groups, step=learner.state().step + 1)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def boot(folder: Path, name: str) -> LearnerBoot:
    """A learner that writes no checkpoints."""
    return LearnerBoot(
        model=str(folder / "model"),
        model_name="m",
        run_id="bench",
        checkpoints_dir=str(folder / name / "checkpoints"),
        weights_dir=str(folder / name / "weights"),
        method="tis",
        learning_rate=1e-6,
        device="cpu",
        checkpoint_every_steps=1000,
        num_threads=1,
    )


def group(number: int, num_prompt: int, num_completion: int) -> TrainGroup:
    """Random tokens, half of the completions right."""
    random = np.random.default_rng(number)
    return TrainGroup(
        group_id=str(number),
        advantage_key=str(number),
        own=True,
        policy_version=0,
        policy_version_newest=0,
        prompt_ids=random.integers(0, 500, num_prompt).astype("<i4").tobytes(),
        completions=tuple(
            TrainCompletion(
                token_ids=random.integers(0, 500, num_completion).astype("<i4").tobytes(),
                logprobs=np.full(num_completion, -6.0, "<f4").tobytes(),
                reward=float(position % 2),
            )
            for position in range(GROUP_SIZE)
        ),
    )


if __name__ == "__main__":
    main()
