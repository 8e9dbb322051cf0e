"""Decides whether both workers are forked from one process that has imported their libraries (`workers/preload.py`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftis_node.generation.engines import ENGINES, has_vllm
from ftis_node.models import pick_device, read_json
from ftis_node.node.worker_settings import threads_of
from ftis_node.workers.preload import PreloadingProcess, can_fork

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.config.node import NodeSettings
    from ftis_node.models import ModelSource

LIBRARIES = ("torch", "transformers.models.auto.modeling_auto")
OWN_MODULES = ("ftis_node.workers.worker", ENGINES["torch"], "ftis_node.learner.core")
FAMILY = re.compile(r"[a-z][a-z0-9_]*")


def preloading_of(settings: NodeSettings, source: ModelSource, *, log_path: Path) -> PreloadingProcess | None:
    """Return the process that forks both workers; None if they are spawned.

    They are forked on the CPU, for the torch engine, if both compute with the same number of threads.
    """
    learner, num_threads = settings.learner, threads_of(settings.generation.threads)
    if settings.role != "full" or learner.num_ranks != 1 or num_threads != threads_of(learner.threads):
        return None
    if not (settings.engine == "torch" or (settings.engine == "auto" and not has_vllm())):
        return None
    if pick_device(settings.device) != "cpu" or not can_fork():
        return None
    environment = {"OMP_NUM_THREADS": str(num_threads)}
    return PreloadingProcess((*LIBRARIES, *_model_modules(source), *OWN_MODULES), environment, log_path)


def _model_modules(source: ModelSource) -> tuple[str, ...]:
    """Return the module of the model's class in transformers, if the configuration names its family."""
    family = str(read_json(source.folder / "config.json").get("model_type", "")).replace("-", "_")
    return (f"transformers.models.{family}.modeling_{family}",) if FAMILY.fullmatch(family) else ()
