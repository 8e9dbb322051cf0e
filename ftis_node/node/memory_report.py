"""The memory plan as `doctor` tells it: where the workers go, every part in GiB, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ftis_node.config.manifest import load_manifest, read_manifest
from ftis_node.config.node import load_node_settings
from ftis_node.errors import FtisError
from ftis_node.node.findings import GIB, Finding, in_gib
from ftis_node.node.memory_plan import plan
from ftis_node.node.placement import find_seats, look_around

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.models import ModelShape
    from ftis_node.node.memory_changes import Change
    from ftis_node.node.memory_plan import MemoryPlan

DEFAULT_RUN = "gsm8k-ftis"
PLACES = {
    "cpu": "no GPU: both workers in host memory",
    "split": "both workers stay on one GPU",
    "sleep": "one GPU: the generator sleeps while the learner steps",
    "separate": "the generator on the first GPU, the learner on the next",
    "none": "does not fit",
}


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """Whether `settings.model` fits; `gpus_bytes` are GPUs to suppose, None: those of this machine."""

    settings: NodeSettings
    manifest: RunManifest
    gpus_bytes: tuple[int, ...] | None = None


def ask(
    home: Home, *, model: str, run: str | None = None, lora: bool | None = None, gpus_gib: Sequence[float] = ()
) -> MemoryQuestion:
    """The question that the flags of `doctor` mean: settings as `join` would read them, and a preset's or a file's run.

    Without `run` the home's own, else `gsm8k-ftis`. Raises ConfigError.
    """
    settings = load_node_settings(home.node_toml, model=model, lora=lora)
    if run is None and home.run_toml.exists():
        manifest = read_manifest(home.run_toml)
    else:
        manifest = load_manifest(run or DEFAULT_RUN)
    return MemoryQuestion(settings, manifest, tuple(int(gib * GIB) for gib in gpus_gib) or None)


def answer(question: MemoryQuestion, shape: ModelShape) -> Iterator[Finding]:
    """The plan for a model of this shape."""
    try:
        made = _plan(question, shape)
    except FtisError as error:
        yield Finding("memory.plan", "fail", str(error))
        return
    trains = "a LoRA adapter" if question.settings.lora else "all weights"
    yield from report(made, title=f"{question.manifest.name}, {trains}")


def _plan(question: MemoryQuestion, shape: ModelShape) -> MemoryPlan:
    """Of supposed GPUs as they are given, of this machine as `join` would use it."""
    settings, gpus_bytes = question.settings, question.gpus_bytes
    if gpus_bytes is None:
        settings, machine = look_around(settings)
        gpus_bytes = find_seats(len(machine.devices_bytes), settings).devices_bytes(machine.devices_bytes)
    host_bytes = psutil.virtual_memory().available
    return plan(shape, gpus_bytes, settings, question.manifest, host_bytes=host_bytes)


def report(made: MemoryPlan, *, title: str) -> Iterator[Finding]:
    """A plan as findings: the verdict, its parts, the cache's share, and the changes."""
    verdict = f"{title}: {PLACES[made.placement]}: {in_gib(made.peak_bytes)} at the peak of {in_gib(made.usable_bytes)}"
    advice = "" if made.fits else _advice(made)
    yield Finding("memory.plan", "ok" if made.fits else "fail", verdict, advice, made.peak_bytes)
    for name, num_bytes in made.parts.items():
        if num_bytes:
            yield Finding("memory.part", "ok", f"{in_gib(num_bytes):>10}  {name}", num_bytes=num_bytes)
    if made.gpu_memory_utilization is not None:
        yield Finding("memory.part", "ok", f"the generator's share of its GPU: {made.gpu_memory_utilization:.3f}")
        yield Finding(
            "memory.part", "ok", f"host memory beside it: {in_gib(made.host_bytes)}", num_bytes=made.host_bytes
        )
    yield from map(_change, made.changes)


def _advice(made: MemoryPlan) -> str:
    if any(change.fits for change in made.changes):
        return "make a change that would fit, named below"
    return "take a smaller model or a larger device: no change below is enough"


def _change(change: Change) -> Finding:
    verdict = f"would fit ({change.placement})" if change.fits else "would not fit"
    return Finding(
        "memory.change", "warn", f"{change.name}: {in_gib(change.peak_bytes)}, {verdict}", num_bytes=change.peak_bytes
    )
