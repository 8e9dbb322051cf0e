"""`env`: the machine, and its rates of copies and products. `contexts`: bytes of processes without a model."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from ftis_node.lab.card.device_speed import peak_flops, seconds
from ftis_node.lab.card.usage import ask_driver, gib, read_gpu
from ftis_node.telemetry.terminal_text import GIB
from gpu.cases import Options
from process_memory import used_bytes

PACKAGES = ("torch", "transformers", "peft", "safetensors", "vllm", "trl", "bitsandbytes", "hivemind")
SHM = Path("/dev/shm")
IDLE = "import sys; sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.read()"
BARE = """import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
one = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
(one @ one).sum().item()
"""
DAEMON = "from ftis_node.models import list_accelerators\nlist_accelerators()\n"


def machine(options: Options) -> dict[str, Any]:
    """Return driver, packages and sizes."""
    found: dict[str, Any] = {"packages": {name: _version(name) for name in PACKAGES}, "cuda": torch.version.cuda}
    if options.device == "cuda":
        found |= {
            "name": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "memory_gib": gib(torch.cuda.get_device_properties(0).total_memory),
            "driver": ask_driver("driver_version"),
            "power_limit_w": ask_driver("power.limit"),
        }
    host = psutil.virtual_memory().total
    return found | {"cores": os.cpu_count(), "host_gib": gib(host), "shm_free_gib": gib(shutil.disk_usage(SHM).free)}


def peak(options: Options) -> dict[str, Any]:
    """Return the rate of a bfloat16 product, and the data sheet's."""
    return peak_flops(options.device)


def copies(options: Options) -> dict[str, Any]:
    """Return the GB/s between device and host: pageable, pinned, and a file in /dev/shm whose pages are registered."""
    device, num_bytes = options.device, 16 << 20 if options.small else 2 * GIB
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    hosts = {"pageable": torch.zeros(num_bytes, dtype=torch.uint8)}
    if device == "cuda":
        hosts["pinned"] = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    rates: dict[str, Any] = {}
    with tempfile.TemporaryFile(dir=SHM) as file:
        file.truncate(num_bytes)
        with mmap.mmap(file.fileno(), num_bytes) as mapped:
            hosts["shm"] = torch.frombuffer(mapped, dtype=torch.uint8)
            register(hosts["shm"], device)
            for name, host in hosts.items():
                out_s = seconds(partial(host.copy_, there), device, rounds=5)
                in_s = seconds(partial(there.copy_, host), device, rounds=5)
                rates[f"{name}_d2h_gbps"] = round(num_bytes / 1e9 / out_s, 2)
                rates[f"{name}_h2d_gbps"] = round(num_bytes / 1e9 / in_s, 2)
            unregister(hosts["shm"], device)
            del host, hosts
    best = rates["pinned_d2h_gbps" if device == "cuda" else "pageable_d2h_gbps"]
    return rates | {"d2h_gbps": best, "h2d_gbps": rates["pinned_h2d_gbps" if device == "cuda" else "pageable_h2d_gbps"]}


def register(host: torch.Tensor, device: str) -> None:
    """Page-lock existing memory. Raises RuntimeError if the driver refuses."""
    if device == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))


def unregister(host: torch.Tensor, device: str) -> None:
    if device == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(host.data_ptr()))


def bare(options: Options) -> dict[str, Any]:
    """Return the bytes of a process that multiplied two matrices: context, kernels, workspace of cuBLAS."""
    return _taken_by(BARE, options)


def daemon(options: Options) -> dict[str, Any]:
    """Return the bytes of a process that listed the accelerators, as the daemon does. It has no context, so 0 bytes."""
    return _taken_by(DAEMON, options)


def _taken_by(code: str, options: Options) -> dict[str, Any]:
    before = read_gpu().used_bytes if options.device == "cuda" else 0
    child = subprocess.Popen([sys.executable, "-c", code + IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        if child.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the process ended with code {child.wait()}")
        used = read_gpu().used_bytes - before if options.device == "cuda" else used_bytes("cpu", child.pid)
        return {"allocated_gib": gib(used)}
    finally:
        child.communicate()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
