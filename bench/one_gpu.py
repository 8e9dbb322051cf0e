"""Both workers on one GPU: whether the memory plan holds, and whether the GPU is busy.

    python bench/one_gpu.py [--shape 0.5b 3b] [--rounds 3] [--lora]

For each shape, with random weights, it runs a few rounds of a node's work (`ftis_node/lab/card/both_workers.py`). It
compares the peak of memory with the plan of `doctor`. `step_s` is the time of the step in its report. `train_s`
also has the messages, publication and proof. No checkpoint is written before the end.

Without a GPU the same runs on the CPU with the shape `12m`, and memory is that of the two workers' processes. That
checks this script, not the plan.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.lab.card.both_workers import Note, measure_workers, short_run
from ftis_node.lab.card.random_model import SHAPES, kept_model

ROUNDS = 3
COMPLETION_TOKENS, SMALL_COMPLETION_TOKENS = 512, 32


def main() -> None:
    """Measure every shape and print the result."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ["0.5b", "3b"] if device == "cuda" else ["12m"]
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=shapes)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {shape: {} for shape in options.shape}
    for shape in options.shape:
        how = {"lora": options.lora, "device": device, "small": device == "cpu", "rounds": options.rounds}
        measure(shape, note=figures[shape].update, **how)
        sys.stderr.write(f"{shape}: {figures[shape]}\n")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    sys.stdout.write(json.dumps({"bench": "one_gpu", "device": name, "torch": torch.__version__, **figures}) + "\n")


def measure(shape: str, *, lora: bool, device: str, small: bool, note: Note, rounds: int = ROUNDS) -> None:
    """Measure one shape."""
    settings = NodeSettings(
        model=str(random_model(shape, device)), lora=lora, device=device, engine="auto" if device == "cuda" else "torch"
    )
    manifest = short_run(SMALL_COMPLETION_TOKENS if small else COMPLETION_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        measuring = measure_workers(
            settings,
            manifest,
            Home(Path(folder) / "home"),
            note=note,
            rounds=rounds,
            num_groups=2 if small else None,
            vocab_size=SHAPES[shape]["vocab_size"],
        )
        asyncio.run(measuring)


def random_model(shape: str, device: str) -> Path:
    """Return the folder of a random model. If it is missing, write it, on the GPU if there is one.

    On a CPU one of 3B takes a minute. A separate process does it, because this one must not use memory of the GPU.
    """
    how = {"device": device}
    process = multiprocessing.get_context("spawn").Process(target=kept_model, args=(shape,), kwargs=how)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the model of {shape} was not written (exit code {process.exitcode})")
    return kept_model(shape)


if __name__ == "__main__":
    main()
