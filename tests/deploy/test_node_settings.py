"""deploy/node: each example is read as a node reads it, and its model fits the card by the memory plan."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import load_node_settings
from ftis_node.memory.plan import Machine, plan
from ftis_node.models import shape_of
from ftis_node.node.storage.disk_space import usual_home_bytes
from ftis_node.workers.weight_store import VERSIONS_AT_ONCE
from tests.deploy.files import DEPLOY, documents
from tests.models.test_model_shape import QWEN_05B, QWEN_3B

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": QWEN_05B,
    "Qwen/Qwen2.5-1.5B": QWEN_05B
    | {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "Qwen/Qwen2.5-3B": QWEN_3B,
    "Qwen/Qwen2.5-7B": QWEN_05B
    | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
    "Qwen/Qwen2.5-14B": QWEN_05B
    | {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8}
    | {"intermediate_size": 13824, "vocab_size": 152064, "tie_word_embeddings": False},
}
# What CUDA reports of the smallest cards sold under this name, or a little less.
SMALLEST_GIB = {8: 7.6, 16: 14.5, 24: 22.0, 48: 44.0, 80: 79.0}
FILES = sorted((DEPLOY / "node").glob("*.toml"))


def planned(path: Path, gib: float, **changes: Any) -> Any:
    settings = load_node_settings(path, **changes)
    shape = shape_of(SHAPES[settings.model])
    return plan(shape, Machine((int(gib * GIB),), 64 * GIB), settings, load_manifest("gsm8k-ftis"))


def test_there_is_one_for_each_card() -> None:
    assert [path.name for path in FILES] == sorted(f"gpu-{size}gb.toml" for size in SMALLEST_GIB)
    (kustomization,) = documents(DEPLOY / "node" / "kustomization.yaml")
    assert sorted(kustomization["configMapGenerator"][0]["files"]) == [path.name for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_model_fits_the_card_as_its_header_says(path: Path) -> None:
    size = int(re.findall(r"\d+", path.name)[0])
    made = planned(path, SMALLEST_GIB[size])
    header = path.read_text().split("\nmodel =")[0]
    told = f"plan: {made.placement}, {made.peak_bytes / GIB:.1f} of {made.usable_bytes / GIB:.1f} GiB"
    assert made.fits, made.changes
    assert f"{told}, host memory {made.host_bytes / GIB:.1f} GiB" in header
    assert f"--model {load_node_settings(path).model} --gpu-memory {SMALLEST_GIB[size]:g}`" in header


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_home_takes_as_much_disk_as_its_header_says(path: Path) -> None:
    settings = load_node_settings(path)
    shape = shape_of(SHAPES[settings.model])
    trained = shape.adapter_parameters(settings.lora_adapter.rank) if settings.lora else shape.num_parameters
    most = usual_home_bytes(settings, checkpoint_bytes=12 * trained, weights_bytes=VERSIONS_AT_ONCE * 2 * trained)
    assert f"disk: at most {most / 1e9:.0f} GB" in path.read_text()


def test_what_the_headers_say_would_fit_besides() -> None:
    other = planned(DEPLOY / "node" / "gpu-16gb.toml", 14.5, model="Qwen/Qwen2.5-0.5B", lora=False)
    largest = {"model": "Qwen/Qwen2.5-14B", "lora": True, "generation": {"max_batch": 32}}
    assert other.fits
    assert planned(DEPLOY / "node" / "gpu-80gb.toml", 79.0, **largest).fits
