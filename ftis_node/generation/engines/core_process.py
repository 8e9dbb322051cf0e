"""The process of vLLM's engine core, if it is separate: Python's fork server starts it, and imports vLLM before.

    begin() --> [fork server, imports vLLM] --forks--> inspection of the architecture, at the first start of a model
                   while the worker imports it, too  --forks--> engine core

vLLM would start a new process for each, one after the other, that imports vLLM again. Its own server uses the fork
server in the same way. Importing vLLM starts no CUDA, so the forked processes can use it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOADED = "ftis_node.generation.engines.core_imports"
# Parts of vLLM's server, which its core imports for requests with tools or reasoning. They take 1 s to import.
SERVER = ("vllm.entrypoints.mcp.tool_server", "vllm.parser.engine.adapters")
CAN_FORK = "microsoft" not in platform.release().lower()  # in WSL a forked process cannot use NVIDIA's library NVML


class CoreProcess(ForkServerProcess):
    """A process of the fork server that gets the environment of its parent."""

    def __init__(self, *, target: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> None:
        super().__init__(target=_run, name=name, args=(dict(os.environ), target, kwargs))


class CoreContext(ForkServerContext):
    Process = CoreProcess


def begin() -> None:
    """Start the fork server. It ends with the thread that calls this."""
    if CAN_FORK:
        multiprocessing.set_forkserver_preload([PRELOADED])
        forkserver.ensure_running()


def use() -> None:
    """Let vLLM, which is imported now, fork its processes."""
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils

    if CAN_FORK:
        utils.get_mp_context = CoreContext
        registry._run_in_subprocess = _inspect


def _run(environment: dict[str, str], target: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(**kwargs)


def _inspect(inspect: Callable[[], Any]) -> Any:
    import cloudpickle  # type: ignore[import-untyped]

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(_inspected, cloudpickle.dumps(inspect)).result()


def _inspected(inspect: bytes) -> Any:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return pickle.loads(inspect)()
