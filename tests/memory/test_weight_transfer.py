"""How new weights get from the learner to the generator, and the memory that the plan reserves for it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.node import NodeSettings
from ftis_node.memory.learner_memory import Workload, learner_memory
from ftis_node.memory.plan import plan
from ftis_node.memory.weight_transfer import is_wsl, transfer_of
from ftis_node.node.storage.disk_space import num_versions
from ftis_node.workers.shared_weights import Transfer
from tests.memory.planning import RUN, THREE_B, machine

ONE_GPU = {"on_gpu": True, "shares_gpu": True, "serves_adapters": False}
NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(
    ("changes", "transport"),
    [
        ({}, "ipc"),
        ({"memory": {"weight_sync": "pinned"}}, "pinned"),
        ({"memory": {"weight_sync": "file"}}, "file"),
        ({"shares_gpu": False}, "pinned"),
        ({"learner": {"processes": 2}}, "pinned"),
        ({"lora": True}, "pinned"),
    ],
)
def test_the_transport_follows_from_the_settings(changes: dict[str, Any], transport: Transfer) -> None:
    where = {name: changes.get(name, value) for name, value in ONE_GPU.items()}
    set_to = {name: value for name, value in changes.items() if name not in ONE_GPU}
    assert transfer_of(NodeSettings.model_validate({"model": "m"} | set_to), **where, kernel=NOWHERE) == transport


def test_the_transport_is_a_file_on_a_cpu_and_for_served_adapters() -> None:
    for shares, lora, ranks in product((True, False), (True, False), (1, 2)):
        settings = NodeSettings.model_validate({"model": "m", "lora": lora, "learner": {"processes": ranks}})
        for on_gpu in (True, False):
            transport = transfer_of(settings, on_gpu=on_gpu, shares_gpu=shares, serves_adapters=on_gpu, kernel=NOWHERE)
            assert transport == "file"


def test_wsl_is_recognized_by_the_kernel_release(tmp_path: Path) -> None:
    kernel = tmp_path / "osrelease"
    assert not is_wsl(kernel)
    kernel.write_text("6.8.0-45-generic\n")
    assert not is_wsl(kernel)
    settings = NodeSettings(model="m")
    assert transfer_of(settings, on_gpu=True, shares_gpu=True, serves_adapters=False, kernel=kernel) == "ipc"
    kernel.write_text("5.15.153.1-microsoft-standard-WSL2\n")
    assert is_wsl(kernel)
    assert transfer_of(settings, on_gpu=True, shares_gpu=True, serves_adapters=False, kernel=kernel) == "pinned"


def test_mapped_weights_need_no_staging_memory() -> None:
    by: dict[str, Any] = {}
    for transport in ("auto", "pinned"):
        settings = NodeSettings.model_validate({"model": "m", "engine": "vllm", "memory": {"weight_sync": transport}})
        workload = Workload.of(settings, RUN, on_gpu=True)
        sizes = (141,), (80, 80)
        plans = [plan(THREE_B, machine(*size, host_gib=200), settings, RUN) for size in sizes]
        by[transport] = learner_memory(THREE_B, workload).weight_sync, *plans
    staged, one_gpu, two_gpus = by["auto"]
    assert staged == 0
    assert by["pinned"][0] == 2 * THREE_B.embedding_parameters
    assert two_gpus == by["pinned"][2], "weights are mapped on one GPU only"
    assert one_gpu.placement == "shared"
    assert one_gpu.peak_bytes <= by["pinned"][1].peak_bytes
    merged = NodeSettings.model_validate(
        {"model": "m", "engine": "vllm", "lora": True, "generation": {"adapters": "merge"}}
    )
    assert not Workload.of(merged, RUN, on_gpu=True).maps_weights, "merged weights do not exist in the learner"


def test_a_node_that_maps_weights_keeps_fewer_versions_on_disk() -> None:
    settings = NodeSettings(model="m")
    assert (num_versions(settings), num_versions(settings, "pinned"), num_versions(settings, "ipc")) == (3, 3, 2)
