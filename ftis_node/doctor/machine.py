"""Checks of the machine: Python, packages, GPUs, memory, disk. This module imports nothing heavy."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.doctor.check_result import CheckResult, Level
from ftis_node.files import free_bytes
from ftis_node.models.accelerators import Accelerator, unusable_gpu, unusable_system, unused_gpu
from ftis_node.node.storage.disk_space import measure_usage
from ftis_node.node.storage.home_size import usual_home_bytes
from ftis_node.node.supervision.process_limits import MIN_OPEN_FILES, open_files
from ftis_node.plugins import installed_release
from ftis_node.telemetry.host_memory import free_host_bytes
from ftis_node.telemetry.terminal_text import GIB, size
from ftis_node.workers.durable import CHECKPOINT_PREFIX, newest_complete
from ftis_node.workers.weight_store import MEMORY_DISK

PACKAGES = ("torch", "transformers", "peft", "hivemind", "pyzmq", "reasoning-gym", "math-verify", "datasets")
MIN_DISK_BYTES = 5 * GIB
SHORT_RAM_BYTES = 4 * GIB
SMALL_SHM_BYTES = GIB // 2
TAKEN_SHARE = 0.1  # of a GPU's memory: warn if other programs use more
DRIVER_ANSWERS_WITHIN_S = 8.0
DRIVER_QUESTION = "--query-gpu=driver_version,name,memory.total,memory.used,compute_cap"
MIN_DRIVER = 580  # of CUDA 13, as the torch of the vLLM in pyproject.toml needs it
NO_GPU_ADVICE = "use a tiny model, or a machine with a GPU"


def check_limits(home: Home, settings: NodeSettings) -> Iterator[CheckResult]:
    """Yield whether the disk has the space that `settings` allow the home, and the system enough open files."""
    yield _room(home, settings)
    yield files_in(open_files().reachable)


def files_in(reachable: int) -> CheckResult:
    text = f"a process may open {reachable} files"
    if reachable < MIN_OPEN_FILES:
        advice = f"{MIN_OPEN_FILES} are needed: raise `ulimit -Hn`, LimitNOFILE of a unit, --ulimit of a container"
        return CheckResult("limits.files", "fail", text, advice)
    return CheckResult("limits.files", "ok", text)


def _room(home: Home, settings: NodeSettings) -> CheckResult:
    use = measure_usage(home)
    limit = settings.limits.home_bytes or _usual(home, settings)
    if limit is None:
        return CheckResult(
            "limits.disk", "ok", "no limit is set; the default depends on the size of the model's checkpoints"
        )
    text = f"the home has {size(use.used_bytes)} of at most {size(limit)}; {size(use.free_bytes)} are free"
    if use.used_bytes + use.free_bytes < limit:
        advice = "free disk space, or set a lower limits.home_bytes; on a full disk the node pauses"
        return CheckResult("limits.disk", "warn", text, advice, limit)
    return CheckResult("limits.disk", "ok", text, num_bytes=limit)


def _usual(home: Home, settings: NodeSettings) -> int | None:
    """Return the default limit, by the size of the newest checkpoint; None before the first."""
    newest = newest_complete(home.checkpoints, CHECKPOINT_PREFIX)
    if newest is None:
        return None
    checkpoint_bytes = sum(file.stat().st_size for file in newest.iterdir())
    return usual_home_bytes(settings, checkpoint_bytes=checkpoint_bytes, weights_bytes=0)


def check_python() -> Iterator[CheckResult]:
    if problem := unusable_system():
        yield CheckResult("python.system", "fail", *problem)
    yield CheckResult(
        "python.version", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    releases = {name: installed_release(name) for name in PACKAGES}
    advice = "run `make setup` in the clone of ftis-node"
    for name in [name for name, release in releases.items() if release is None]:
        yield CheckResult("package.missing", "fail", f"{name} is missing", advice)
    installed = ", ".join(f"{name} {release}" for name, release in releases.items() if release)
    yield CheckResult("package.installed", "ok", installed)


def check_gpus() -> Iterator[CheckResult]:
    """Yield the driver and each GPU, as `nvidia-smi` reports them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        if unused := unused_gpu():
            yield CheckResult("gpu.unusable", "warn", *unused)
        else:
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
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines() if line.count(",") == 4]
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
    for _, name, total, used, capability in rows:
        major, _, minor = capability.partition(".")
        if (major + minor).isdecimal() and (problem := unusable_gpu(Accelerator(name, 0, (int(major), int(minor))))):
            yield CheckResult("gpu.unusable", "fail", *problem)
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
    memory, free = psutil.virtual_memory(), free_host_bytes()
    text = f"{free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if free < memory.available:
        text += " within the limit of this container or service"
    short = free < SHORT_RAM_BYTES
    advice = "end other programs, or use a tiny model" if short else ""
    yield CheckResult("ram.free", "warn" if short else "ok", text, advice, free)


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
