"""The table of docs/operate/resources.md: what `join` trains of each Qwen2.5 model on each card, by the memory plan.

python -m tests.documented.cards      print it

A card's memory is what CUDA reports for the smallest one sold under its name, or a little less.
"""

from __future__ import annotations

import sys

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.memory.choice import DEFAULT_RUN, compare
from ftis_node.memory.plan import Machine
from ftis_node.models import ModelShape, published_qwen25
from ftis_node.telemetry.terminal_text import GIB

SMALLEST_GIB = {8: 7.6, 12: 11.6, 16: 14.5, 24: 22.0, 32: 31.0, 48: 44.0, 80: 79.0, 141: 139.0}  # key: GB as sold
HOST_GIB = 64
STATES = {"float32": "full", "8bit": "full, 8-bit states", "offload": "full, states on the host"}


def as_markdown() -> str:
    shapes = published_qwen25()
    rows = [
        f"| {size} GB | {' | '.join(_cell(name, shape, gib) for name, shape in shapes.items())} |"
        for size, gib in SMALLEST_GIB.items()
    ]
    return "\n".join([f"| card | {' | '.join(shapes)} |", "|---" * (1 + len(shapes)) + "|", *rows])


def _cell(name: str, shape: ModelShape, gib: float) -> str:
    """Return what `join` would train if all packages are installed; a dash if nothing fits."""
    settings = NodeSettings.model_validate({"model": name, "engine": "vllm"})
    machine = Machine((int(gib * GIB),), HOST_GIB * GIB)
    fitting = (option for option in compare(settings, load_manifest(DEFAULT_RUN), shape, machine) if option.fits)
    if (first := next(fitting, None)) is None:
        return "-"
    if not first.settings.lora:
        return STATES[first.settings.learner.optimizer_states]
    is_smaller = first.settings.generation.max_batch > 0
    return f"LoRA {first.settings.lora_adapter.rank}" + (", small batches" if is_smaller else "")


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
