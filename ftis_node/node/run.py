"""From settings to a running node and back to nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ftis_node.node.build import built_parts
from ftis_node.node.node import run_loops
from ftis_node.node.signals import until_signalled

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.config.node import NodeSettings
    from ftis_node.node.plan import RunPlan


def run_until_stopped(settings: NodeSettings, plan: RunPlan, home: Home, *, steps: int | None) -> None:
    """Runs a node in this process until its steps are done, or SIGINT or SIGTERM arrives.

    Raises FtisError: HomeInUseError, ConfigError, ModelError, NetworkError, MachineError, WorkerError.
    """
    with home.owned():
        asyncio.run(until_signalled(_run(settings, plan, home, steps=steps)))


async def _run(settings: NodeSettings, plan: RunPlan, home: Home, *, steps: int | None) -> None:
    async with built_parts(settings, plan, home) as parts:
        await run_loops(parts, steps=steps)
