"""The environment of the learner's process: how its allocators keep or return memory, and its threads."""

import os
import subprocess
import sys

import msgspec
from learner_rig import make_boot

from ftis_node.learner.client import worker_environment

BLOCK_BYTES = 200 << 20  # an arena of a thread has 64 MiB at most, and larger blocks are unmapped
PROGRAM = f"""
import threading, re, pathlib

def resident_kb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

def work():
    block = bytearray({BLOCK_BYTES})
    for place in range(0, len(block), 4096):
        block[place] = 1
    held = resident_kb()
    del block
    print(held - resident_kb())

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def given_back_bytes(environment: dict[str, str]) -> int:
    """Return the bytes that the process returns to the kernel when a thread frees a block."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain | environment, capture_output=True, text=True, check=True, timeout=50
    )
    return 1024 * int(done.stdout)


def test_on_a_cpu_the_process_keeps_freed_blocks(tmp_path):
    boot = make_boot(tmp_path, tmp_path)
    assert boot.device == "cpu"
    assert given_back_bytes({}) > 0.9 * BLOCK_BYTES, "by default the block is returned"
    assert given_back_bytes(worker_environment(boot)) < 0.1 * BLOCK_BYTES


def test_with_a_generator_on_the_same_gpu_segments_are_expandable(tmp_path, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    alone = msgspec.structs.replace(make_boot(tmp_path, tmp_path), device="cuda")
    beside = msgspec.structs.replace(alone, memory_share=0.5)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in worker_environment(alone)
    assert worker_environment(beside)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in worker_environment(beside), "a variable that is set is not changed"


def test_with_a_gpu_freed_memory_of_the_host_is_returned(tmp_path):
    boot = make_boot(tmp_path, tmp_path, device="cuda", num_threads=3, kernels="plain")
    assert worker_environment(boot) == {"OMP_NUM_THREADS": "3"}
