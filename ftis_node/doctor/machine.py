"""Checks of the machine: Python, packages, GPUs, memory, disk. This module imports nothing heavy."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import TYPE_CHECKING

import psutil

from ftis_node.config.disk_room import free_bytes
from ftis_node.doctor.check_result import CheckResult, Level
from ftis_node.telemetry.sizes import GIB
from ftis_node.workers.weights.folder import MEMORY_DISK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGES = ("torch", "transformers", "peft", "hivemind", "pyzmq", "reasoning-gym", "math-verify", "datasets")
MIN_DISK_BYTES = 5 * GIB
SHORT_RAM_BYTES = 4 * GIB
SMALL_SHM_BYTES = GIB // 2
TAKEN_SHARE = 0.1  # of a GPU's memory: warn if other programs use more
DRIVER_ANSWERS_WITHIN_S = 8.0
DRIVER_QUESTION = "--query-gpu=driver_version,name,memory.total,memory.used"
MIN_DRIVER = 580  # of CUDA 13, as the torch of the vLLM in pyproject.toml needs it
NO_GPU_ADVICE = "use a tiny model, or a machine with a GPU"


def check_python() -> Iterator[CheckResult]:
    """Yield the version of Python and of the packages that ftis-node needs."""
    yield CheckResult(
        "python.version", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield CheckResult("package.missing", "fail", f"{name} is missing", "install ftis-node again with pip")
    yield CheckResult("package.installed", "ok", ", ".join(versions))


def check_gpus() -> Iterator[CheckResult]:
    """Yield the driver and each GPU, as `nvidia-smi` reports them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield CheckResult("gpu.none", "warn", "no NVIDIA driver: models run on the CPU", NO_GPU_ADVICE)
        return
    try:
        answer = subprocess.run(
            [program, DRIVER_QUESTION, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=DRIVER_ANSWERS_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        advice = "restart the machine, or its driver"
        yield CheckResult("gpu.driver", "fail", f"the driver does not answer in {DRIVER_ANSWERS_WITHIN_S:g} s", advice)
        return
    yield from read_driver(answer.returncode, answer.stdout or answer.stderr)


def read_driver(code: int, output: str) -> Iterator[CheckResult]:
    """Yield the results of an answer of `nvidia-smi`."""
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines() if line.count(",") == 3]
    if code or not rows:
        text = " ".join(output.split())[:200] or "no output"
        yield CheckResult(
            "gpu.driver", "fail", f"nvidia-smi fails: {text}", "reinstall the driver, or restart the machine"
        )
        return
    version = rows[0][0]
    major = version.split(".")[0]
    if major.isdecimal() and int(major) < MIN_DRIVER:
        text = f"NVIDIA driver {version}: vLLM and its torch are built for CUDA 13, which needs {MIN_DRIVER} or newer"
        yield CheckResult("gpu.driver", "warn", text, f"install driver {MIN_DRIVER} or newer")
    else:
        yield CheckResult("gpu.driver", "ok", f"NVIDIA driver {version}")
    for _, name, total, used in rows:
        if not (total.isdecimal() and used.isdecimal()):
            yield CheckResult("gpu.memory", "ok", f"{name}, memory size unknown")
            continue
        total_bytes, used_bytes = int(total) << 20, int(used) << 20
        text = f"{name}, {total_bytes / GIB:.1f} GiB"
        if used_bytes > TAKEN_SHARE * total_bytes:
            advice = "end the programs that use it; `nvidia-smi` lists them"
            yield CheckResult("gpu.memory", "warn", f"{text}, {used_bytes / GIB:.1f} of it used", advice, total_bytes)
        else:
            yield CheckResult("gpu.memory", "ok", text, num_bytes=total_bytes)


def check_memory() -> Iterator[CheckResult]:
    """Yield the machine's memory."""
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    short = memory.available < SHORT_RAM_BYTES
    advice = "end other programs, or use a tiny model" if short else ""
    yield CheckResult("ram.free", "warn" if short else "ok", text, advice, memory.available)


def check_disk(home: Path, memory_disk: Path = MEMORY_DISK) -> Iterator[CheckResult]:
    """Yield the free space for the home, and for weights on their way to the generator."""
    folder = next(parent for parent in (home.absolute(), *home.absolute().parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield CheckResult("disk.writable", "fail", f"{folder} cannot be written to", "give another --home")
    free = free_bytes(folder)
    text = f"{free / GIB:.1f} GiB free at {folder}"
    if free < MIN_DISK_BYTES:
        advice = f"free disk space, or give another --home; {MIN_DISK_BYTES / GIB:.0f} GiB are needed"
        yield CheckResult("disk.free", "fail", text, advice, free)
    else:
        yield CheckResult("disk.free", "ok", text, num_bytes=free)
    yield _shared_memory(memory_disk)


def _shared_memory(memory_disk: Path) -> CheckResult:
    advice = "in a container: docker run --shm-size 8g; else weights go through the home, which is slower"
    if not memory_disk.is_dir():
        return CheckResult("shm.size", "warn", f"there is no {memory_disk}", advice)
    free = free_bytes(memory_disk)
    level: Level = "warn" if free < SMALL_SHM_BYTES else "ok"
    text = f"{free / GIB:.1f} GiB free at {memory_disk}"
    return CheckResult("shm.size", level, text, advice if level == "warn" else "", free)
