"""The engines by name. A new one is a file with an `open_engine` and one row in the table."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias

from ftis_node.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ftis_node.generation.engines.base import Engine, EngineSettings
    from ftis_node.models import ModelSource

EngineName = Literal["auto", "vllm", "torch"]
OpenEngine: TypeAlias = "Callable[..., Awaitable[Engine]]"  # (source, settings, on_progress) -> engine

# Name -> the module that holds `open_engine(source, settings, on_progress)`. "auto" takes the first row.
ENGINES = {"torch": "ftis_node.generation.engines.torch_engine"}


def choose_engine(name: EngineName) -> OpenEngine:
    """What opens the engine of that name; its module is imported only then.

    Raises EngineError where this version has no such engine.
    """
    chosen = next(iter(ENGINES)) if name == "auto" else name
    if chosen not in ENGINES:
        raise EngineError(f"the engine {name!r} is not in this version: use --engine {' or '.join(ENGINES)}")
    return partial(_open, ENGINES[chosen])


async def _open(
    module: str, source: ModelSource, settings: EngineSettings, on_progress: Callable[[], None] = lambda: None
) -> Engine:
    engine: Engine = await import_module(module).open_engine(source, settings, on_progress)
    return engine
