"""The table of docs/operate/resources.md: what `join` trains of each Qwen2.5 model on each card, and a step's time.

python -m tests.documented.cards      print it

Both are the plan's. A card's memory is what CUDA reports for the smallest one of its size, or a little less. Its speed
is that of a card that is sold with it.
"""

import sys

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.memory.choice import DEFAULT_RUN, best_of, compare
from ftis_node.memory.machine import Card, Machine
from ftis_node.memory.step_time import SPEEDS, speed_of
from ftis_node.models import ModelShape, published_qwen25
from ftis_node.telemetry.terminal_text import GIB

SMALLEST_GIB = {8: 7.6, 12: 11.6, 16: 14.5, 24: 22.0, 32: 31.0, 48: 44.0, 80: 79.0, 141: 139.0}  # key: GB as sold
HOST_GIB = 64
STATES = {"float32": "full", "8bit": "full, 8-bit states", "offload": "full, states on the host"}


def as_markdown() -> str:
    shapes = published_qwen25()
    rows = []
    for size, gib in SMALLEST_GIB.items():
        card = Card(int(gib * GIB))
        cells = (_title(size, card), *(_cell(name, shape, card) for name, shape in shapes.items()))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"| card | {' | '.join(shapes)} |", "|---" * (1 + len(shapes)) + "|", *rows])


def _title(size: int, card: Card) -> str:
    name = next(name for name, speed in SPEEDS.items() if speed is speed_of(card))
    return f"{size} GB, {name}"


def _cell(name: str, shape: ModelShape, card: Card) -> str:
    """Return what `join` would train with all packages, if nothing fits with `--quantize 4bit`; else a dash."""
    machine = Machine((card,), HOST_GIB * GIB)
    for quantize in ("none", "4bit"):
        settings = NodeSettings.model_validate({"model": name, "engine": "vllm", "quantize": quantize})
        options = compare(settings, load_manifest(DEFAULT_RUN), shape, machine)
        if (best := best_of([option for option in options if option.fits])) is not None:
            break
    else:
        return "-"
    trains = STATES[best.settings.learner.optimizer_states]
    if best.settings.lora:
        base = ", 4 bits" if quantize == "4bit" else ""
        base = ", one base" if best.made.shares_base else base
        batches = ", small batches" if best.settings.generation.max_batch and not base else ""
        trains = f"LoRA {best.settings.lora_adapter.rank}{base}{batches}"
    return f"{trains}: {best.made.step_s:.0f} s"


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
