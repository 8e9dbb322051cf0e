"""deploy/node: a node reads each example, and the model fits the card by the memory plan."""

import re
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import load_node_settings
from ftis_node.memory.plan import plan
from ftis_node.models import ModelShape, published_qwen25
from ftis_node.node.storage.home_size import usual_home_bytes
from ftis_node.workers.weight_store import VERSIONS_AT_ONCE
from tests.deploy.files import DEPLOY
from tests.memory.planning import machine

GIB = 1 << 30
# The memory that CUDA reports for the smallest cards of this size, or slightly less.
SMALLEST_GIB = {8: 7.6, 16: 14.5, 24: 22.0, 48: 44.0, 80: 79.0}  # by the names of the files
FILES = sorted((DEPLOY / "node").glob("*.toml"))


def shape_of(model: str) -> ModelShape:
    return published_qwen25()[model.removeprefix("Qwen/")]


def planned(path: Path, gib: float, **changes: Any) -> Any:
    settings = load_node_settings(path, **changes)
    return plan(shape_of(settings.model), machine(gib), settings, load_manifest("gsm8k-ftis"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_model_fits_the_card_and_the_disk_as_its_header_states(path):
    size = int(re.findall(r"\d+", path.name)[0])
    made = planned(path, SMALLEST_GIB[size])
    header = path.read_text().split("\nmodel =")[0]
    summary = f"plan: {made.placement}, {made.peak_bytes / GIB:.1f} of {made.usable_bytes / GIB:.1f} GiB"
    assert made.fits, made.advice
    assert f"{summary}, host memory {made.host_bytes / GIB:.1f} GiB" in header
    assert f"--model {load_node_settings(path).model} --gpu-memory {SMALLEST_GIB[size]:g}`" in header
    settings = load_node_settings(path)
    shape = shape_of(settings.model)
    trained = shape.adapter_parameters(settings.lora_adapter.rank) if settings.lora else shape.num_parameters
    most = usual_home_bytes(settings, checkpoint_bytes=12 * trained, weights_bytes=VERSIONS_AT_ONCE * 2 * trained)
    assert f"disk: at most {most / 1e9:.0f} GB" in header


def test_the_alternatives_in_the_headers_fit():
    other = planned(DEPLOY / "node" / "gpu-16gb.toml", 14.5, model="Qwen/Qwen2.5-0.5B", lora=False)
    largest = {"model": "Qwen/Qwen2.5-14B", "lora": True, "generation": {"max_batch": 32}}
    assert other.fits
    assert planned(DEPLOY / "node" / "gpu-80gb.toml", 79.0, **largest).fits
