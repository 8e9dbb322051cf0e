"""How new weights cross, as a table; and what the plan keeps free for it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.memory.learner_memory import Workload, learner_memory
from ftis_node.memory.plan import Machine, plan
from ftis_node.memory.weight_transport import is_wsl, transport_of
from ftis_node.models import published_qwen25
from ftis_node.node.storage.disk_space import num_versions

if TYPE_CHECKING:
    from ftis_node.workers.shared_weights import Way

ONE_GPU = {"on_gpu": True, "shares_gpu": True, "serves_adapters": False}
NOWHERE = Path("/nowhere")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "ipc"),
        ({"memory": {"weight_sync": "pinned"}}, "pinned"),
        ({"memory": {"weight_sync": "file"}}, "file"),
        ({"shares_gpu": False}, "pinned"),
        ({"learner": {"processes": 2}}, "pinned"),
        ({"lora": True}, "pinned"),
        ({"lora": True, "serves_adapters": True}, "file"),
        ({"on_gpu": False}, "file"),
        ({"on_gpu": False, "shares_gpu": True, "lora": True}, "file"),
    ],
)
def test_the_way(changes: dict[str, Any], way: Way) -> None:
    where = {name: changes.get(name, value) for name, value in ONE_GPU.items()}
    set_to = {name: value for name, value in changes.items() if name not in ONE_GPU}
    assert transport_of(NodeSettings.model_validate({"model": "m"} | set_to), **where, kernel=NOWHERE) == way


def test_on_a_cpu_and_for_adapters_it_is_always_a_file() -> None:
    for shares, lora, ranks in product((True, False), (True, False), (1, 2)):
        settings = NodeSettings.model_validate({"model": "m", "lora": lora, "learner": {"processes": ranks}})
        for on_gpu in (True, False):
            way = transport_of(settings, on_gpu=on_gpu, shares_gpu=shares, serves_adapters=on_gpu, kernel=NOWHERE)
            assert way == "file"


def test_windows_says_so_in_the_kernels_name(tmp_path: Path) -> None:
    kernel = tmp_path / "osrelease"
    assert not is_wsl(kernel)
    kernel.write_text("6.8.0-45-generic\n")
    assert not is_wsl(kernel)
    settings = NodeSettings(model="m")
    assert transport_of(settings, on_gpu=True, shares_gpu=True, serves_adapters=False, kernel=kernel) == "ipc"
    kernel.write_text("5.15.153.1-microsoft-standard-WSL2\n")
    assert is_wsl(kernel)
    assert transport_of(settings, on_gpu=True, shares_gpu=True, serves_adapters=False, kernel=kernel) == "pinned"


def test_mapped_weights_are_staged_nowhere_in_the_learner_and_not_in_host_memory() -> None:
    shape, run = published_qwen25()["Qwen2.5-3B"], load_manifest("gsm8k-ftis")
    by: dict[str, Any] = {}
    for way in ("auto", "pinned"):
        settings = NodeSettings.model_validate({"model": "m", "engine": "vllm", "memory": {"weight_sync": way}})
        workload = Workload.of(settings, run, on_gpu=True)
        sizes = (141 * GIB,), (80 * GIB, 80 * GIB)
        plans = [plan(shape, Machine(size, 200 * GIB), settings, run) for size in sizes]
        by[way] = learner_memory(shape, workload).hand_over, *plans
    staged, one_gpu, two_gpus = by["auto"]
    assert staged == 0
    assert by["pinned"][0] == 2 * shape.embedding_parameters
    assert two_gpus == by["pinned"][2], "nothing is mapped from one GPU to another"
    assert one_gpu.placement == "shared"
    assert one_gpu.peak_bytes <= by["pinned"][1].peak_bytes
    offloaded = NodeSettings.model_validate(
        {"model": "m", "engine": "vllm", "lora": True, "generation": {"adapters": "merge"}}
    )
    assert not Workload.of(offloaded, run, on_gpu=True).maps_weights, "a merged adapter lies nowhere"


def test_a_file_in_reserve_takes_less_room_than_one_after_every_step() -> None:
    settings = NodeSettings(model="m")
    assert (num_versions(settings), num_versions(settings, "pinned"), num_versions(settings, "ipc")) == (3, 3, 2)
