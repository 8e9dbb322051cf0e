"""The environment of the learner's process: how its allocators keep or return memory, and its threads."""

import msgspec
from learner_rig import make_boot

from ftis_node.learner.client import KEEPS_FREED_BLOCKS, worker_environment


def test_with_a_generator_on_the_same_gpu_segments_are_expandable(tmp_path, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    alone = msgspec.structs.replace(make_boot(tmp_path, tmp_path), device="cuda")
    beside = msgspec.structs.replace(alone, memory_share=0.5)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in worker_environment(alone)
    assert worker_environment(beside)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in worker_environment(beside), "a variable that is set is not changed"


def test_freed_memory_of_the_host_is_kept_on_a_cpu_only(tmp_path):
    boot = make_boot(tmp_path, tmp_path, device="cuda", num_threads=3, kernels="plain")
    assert worker_environment(boot) == {"OMP_NUM_THREADS": "3"}
    assert worker_environment(msgspec.structs.replace(boot, device="cpu")).items() > KEEPS_FREED_BLOCKS.items()
