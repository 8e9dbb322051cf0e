"""`ftis-node doctor --gpu`: both workers on the user's card for about three minutes, and one file for a report.

The figures are those of bench/one_gpu.py, and one sleep and wake of the engine. A random model of `SHAPE` takes no
download; a user's own model may replace it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import platform
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from ftis_node.config.home import Home
from ftis_node.errors import MachineError
from ftis_node.lab.card.both_workers import measure_workers, short_run
from ftis_node.lab.fixed_settings import FixedSettings
from ftis_node.models import list_accelerators
from ftis_node.plugins import installed_release
from ftis_node.telemetry.log import OnProgress

SHAPE, COMPLETION_TOKENS, NUM_GROUPS, ROUNDS = "0.5b", 256, 8, 3
CPU_SHAPE, CPU_COMPLETION_TOKENS, CPU_NUM_GROUPS = "2m", 8, 2
PACKAGES = ("ftis-node", "torch", "transformers", "vllm", "bitsandbytes")
ROWS = {  # of the table: figure, text, unit
    "name": ("card", ""),
    "planned_gib": ("memory by the plan", "GiB"),
    "peak_gib": ("memory at the peak", "GiB"),
    "placement": ("placement", ""),
    "engine_start_s": ("start of the engine", "s"),
    "learner_start_s": ("start of the learner", "s"),
    "generated_tokens_per_s": ("generation", "tokens/s"),
    "learner_tokens_per_s": ("learner", "tokens/s"),
    "step_s": ("a step", "s"),
    "transfer_s": ("transfer of weights", "s"),
    "sleep_s": ("sleep of the engine", "s"),
    "wake_s": ("wake of the engine", "s"),
    "product_tflops": ("matrix products", "TFLOP/s"),
    "peak_tflops": ("data sheet", "TFLOP/s"),
}


def check_card(
    file: Path,
    *,
    model: str | None = None,
    lora: bool = False,
    quantize: str = "none",
    on_progress: OnProgress,
    device: Literal["cuda", "cpu"] = "cuda",
) -> dict[str, Any]:
    """Measure the first GPU, and return the figures, which `file` has as soon as each is measured.

    `device` "cpu" is for tests. Raises MachineError if there is no GPU, or the model does not fit.
    """
    if device == "cuda" and not list_accelerators():
        raise MachineError("there is no GPU that torch can use: --gpu measures one; `ftis-node doctor` says why")
    on_gpu = device == "cuda"
    packages = {name: release for name in PACKAGES if (release := installed_release(name))}
    found: dict[str, Any] = {"schema": 1, "python": platform.python_version(), "packages": packages}

    def note(**figures: object) -> None:
        found.update(figures)
        file.write_text(json.dumps(found, indent=1) + "\n")
        on_progress(None, ", ".join(f"{key} {value}" for key, value in figures.items()))

    shape = SHAPE if on_gpu else CPU_SHAPE
    on_progress(None, "measuring matrix products")
    note(model=model or f"random, {shape}", lora=lora, quantize=quantize, **_in_process("rates", device))
    vocab_size = None
    if model is None:
        on_progress(None, f"making a random model of the shape {shape}")
        made = _in_process("random_model", device, shape)
        model, vocab_size = made["folder"], made["vocab_size"]
    manifest = short_run(COMPLETION_TOKENS if on_gpu else CPU_COMPLETION_TOKENS)
    how = {"model": model, "lora": lora or quantize != "none", "quantize": quantize}
    settings = FixedSettings.model_validate({**how, "device": device, "gpus": 1 if on_gpu else 0})
    on_progress(None, "starting both workers")
    with TemporaryDirectory(prefix="ftis-doctor-") as folder:
        measuring = measure_workers(
            settings if on_gpu else settings.model_copy(update={"engine": "torch"}),
            manifest,
            Home(Path(folder)),
            note=note,
            rounds=ROUNDS,
            num_groups=NUM_GROUPS if on_gpu else CPU_NUM_GROUPS,
            vocab_size=vocab_size,
            tries_sleep=True,
        )
        asyncio.run(measuring)
    return found


def table_of(found: dict[str, Any]) -> list[str]:
    """Return the lines of a table of the figures that were measured."""
    rows = [(text, found[key], unit) for key, (text, unit) in ROWS.items() if found.get(key) is not None]
    return [f"{text:22} {value:>14} {unit}".rstrip() for text, value, unit in rows]


def rates(device: str) -> dict[str, Any]:
    """Return the card's name, memory and rates."""
    import torch

    from ftis_node.lab.card.device_speed import peak_flops
    from ftis_node.lab.card.usage import gib

    if device == "cpu":
        return {"name": "cpu", **peak_flops(device)}
    card = torch.cuda.get_device_properties(0)
    capability = f"{card.major}.{card.minor}"
    return {"name": card.name, "capability": capability, "memory_gib": gib(card.total_memory), **peak_flops(device)}


def random_model(device: str, shape: str) -> dict[str, Any]:
    """Return the folder of a random model, which is made if it is missing, and its vocabulary's size."""
    from ftis_node.lab.card.random_model import SHAPES, kept_model

    return {"folder": str(kept_model(shape, device=device)), "vocab_size": SHAPES[shape]["vocab_size"]}


def _in_process(name: str, *arguments: str) -> dict[str, Any]:
    """Call a function of this module in another process: here torch would keep memory of the GPU."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found: dict[str, Any] = pool.submit(globals()[name], *arguments).result()
        return found
