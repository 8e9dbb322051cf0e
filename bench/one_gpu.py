"""Both workers on one GPU: whether the memory plan holds, and whether the GPU is busy.

    python bench/one_gpu.py [--model 0.5b 3b] [--rounds 3] [--lora] [--quantize 4bit] [--out one-gpu.json]

For each model it runs a few rounds of a node's work (`bench/card/both_workers.py`). A model is a random one of a shape,
or an id or folder. It compares the peak of memory with the plan of `doctor`. `step_s` is the time of the step in its
report. `train_s` also has the messages, publication and proof. No checkpoint is written before the end. The file has
each figure as soon as it is measured.

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

from bench.card.both_workers import Note, measure_workers, short_run
from bench.card.random_model import SHAPES, kept_model
from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings

ROUNDS = 3
COMPLETION_TOKENS, SMALL_COMPLETION_TOKENS = 512, 32


def main() -> None:
    """Measure every model and print the result."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["0.5b", "3b"] if device == "cuda" else ["12m"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--quantize", choices=["none", "4bit"], default="none")
    parser.add_argument("--out", type=Path, default=Path("one-gpu.json"))
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found: dict[str, Any] = {"bench": "one_gpu", "device": name, "torch": torch.__version__}
    for model in options.model:
        figures = found[model] = {}

        def note(figures: dict[str, Any] = figures, **measured: object) -> None:
            figures.update(measured)
            options.out.write_text(json.dumps(found, indent=1) + "\n")

        how = {"lora": options.lora, "quantize": options.quantize, "rounds": options.rounds}
        measure(model, note=note, device=device, small=device == "cpu", **how)
        sys.stderr.write(f"{model}: {figures}\n")
    sys.stdout.write(json.dumps(found) + "\n")


def measure(
    model: str, *, lora: bool, device: str, small: bool, note: Note, rounds: int = ROUNDS, quantize: str = "none"
) -> None:
    """Measure one model."""
    is_random, on_gpu = model in SHAPES, device == "cuda"
    settings = NodeSettings.model_validate(
        {
            "model": str(random_model(model, device)) if is_random else model,
            "lora": lora or quantize != "none",
            "quantize": quantize,
            "device": device,
            "gpus": int(on_gpu),
            "engine": "auto" if on_gpu else "torch",
        }
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
            vocab_size=SHAPES[model]["vocab_size"] if is_random else None,
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
