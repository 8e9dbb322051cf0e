"""How new weights get from the learner to the generator, and the memory that the plan reserves for it."""

from __future__ import annotations

from typing import Any

from ftis_node.config.node import NodeSettings
from ftis_node.memory.learner_memory import Workload, learner_memory
from ftis_node.memory.plan import plan
from ftis_node.memory.weight_transfer import is_wsl, transfer_of
from ftis_node.node.storage.disk_space import num_versions
from tests.memory.planning import RUN, THREE_B, machine


def test_wsl_is_recognized_by_the_kernel_release(tmp_path):
    kernel = tmp_path / "osrelease"
    assert not is_wsl(kernel)
    kernel.write_text("6.8.0-45-generic\n")
    assert not is_wsl(kernel)
    settings = NodeSettings(model="m")
    assert transfer_of(settings, on_gpu=True, shares_gpu=True, serves_adapters=False, kernel=kernel) == "ipc"
    kernel.write_text("5.15.153.1-microsoft-standard-WSL2\n")
    assert is_wsl(kernel)
    assert transfer_of(settings, on_gpu=True, shares_gpu=True, serves_adapters=False, kernel=kernel) == "pinned"


def test_mapped_weights_need_no_staging_memory():
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


def test_a_node_that_maps_weights_keeps_fewer_versions_on_disk():
    settings = NodeSettings(model="m")
    assert (num_versions(settings), num_versions(settings, "pinned"), num_versions(settings, "ipc")) == (3, 3, 2)
