"""What the learner's process is given before it starts: large blocks stay with it, in whatever thread it works."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
from learner_rig import make_boot

from ftis_node.learner.client import worker_environment

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

BLOCK_BYTES = 200 << 20  # a thread's own arena holds 64 MiB at most, and what does not fit goes back at once
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
    """What a thread's freed block leaves to the kernel at once."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain | environment, capture_output=True, text=True, check=True, timeout=50
    )
    return 1024 * int(done.stdout)


def test_on_a_cpu_freed_blocks_stay_with_the_process(tmp_path: Path) -> None:
    boot = make_boot(tmp_path, tmp_path)
    assert boot.device == "cpu"
    assert given_back_bytes({}) > 0.9 * BLOCK_BYTES, "else this machine's allocator has nothing to be told"
    assert given_back_bytes(worker_environment(boot)) < 0.1 * BLOCK_BYTES


def test_beside_a_generator_on_one_gpu_the_allocator_s_segments_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    alone = msgspec.structs.replace(make_boot(tmp_path, tmp_path), device="cuda")
    beside = msgspec.structs.replace(alone, memory_share=0.5)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in worker_environment(alone)
    assert worker_environment(beside)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in worker_environment(beside), "what somebody has set stays"


def test_a_compiler_starts_no_processes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.delenv(name, raising=False)
    assert worker_environment(make_boot(tmp_path, tmp_path, kernels="auto"))[name] == "1"
    assert name not in worker_environment(make_boot(tmp_path, tmp_path, kernels="plain"))
    monkeypatch.setenv(name, "8")
    assert name not in worker_environment(make_boot(tmp_path, tmp_path, kernels="auto")), "what somebody has set stays"


def test_with_a_gpu_the_host_gets_its_memory_back(tmp_path: Path) -> None:
    boot = make_boot(tmp_path, tmp_path, device="cuda", num_threads=3, kernels="plain")
    assert worker_environment(boot) == {"OMP_NUM_THREADS": "3"}
