"""The process of vLLM's engine core, if it is separate: Python's fork server starts it, and imports vLLM before.

    begin() --> [fork server: imports vLLM, while the worker imports it, too] --forks--> engine core

vLLM would start the process later, and it would then import vLLM. Its own server uses the fork server in the same way.
Importing vLLM starts no CUDA, so the forked process can use it.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOADED = "ftis_node.generation.engines.core_imports"
# Parts of vLLM's server, which its core imports for requests with tools or reasoning. They take 1 s to import.
SERVER = ("vllm.entrypoints.mcp.tool_server", "vllm.parser.engine.adapters")


def is_wsl(kernel_release: str) -> bool:
    """Return whether a kernel is that of Linux under Windows."""
    return "microsoft" in kernel_release.lower()


IS_WSL = is_wsl(platform.release())
# On WSL a forked process cannot use NVIDIA's library NVML.
CAN_FORK = not IS_WSL and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn"


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
    """Let vLLM, which is imported now, fork the core."""
    from vllm.v1.engine import utils

    if CAN_FORK:
        utils.get_mp_context = CoreContext


def _run(environment: dict[str, str], target: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(**kwargs)
