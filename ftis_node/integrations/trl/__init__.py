"""F-TIS and its family as the loss of TRL's `GRPOTrainer`, with groups of a swarm in its batches.

Each name is imported at its first use, after a check of TRL's version: TRL changes its trainer between releases.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ftis_node.errors import UsageError, how_to_install
from ftis_node.plugins import installed_release

if TYPE_CHECKING:
    from ftis_node.integrations.trl.grpo import SwarmGRPOTrainer
    from ftis_node.integrations.trl.run_task import swarm_dataset, swarm_rollout
    from ftis_node.integrations.trl.swarm_exchange import SwarmExchange

__all__ = ["SwarmExchange", "SwarmGRPOTrainer", "swarm_dataset", "swarm_rollout"]
_FILES = {
    "SwarmExchange": "swarm_exchange",
    "SwarmGRPOTrainer": "grpo",
    "swarm_dataset": "run_task",
    "swarm_rollout": "run_task",
}
TRL_VERSION: Final = "1.16.0"  # as in the extra `trl` of pyproject.toml


def require_trl() -> None:
    """Raise UsageError unless the supported release of TRL is installed."""
    if (release := installed_release("trl")) != TRL_VERSION:
        installed = f"trl {release}" if release else "no trl"
        raise UsageError(
            f"ftis_node.integrations.trl needs trl {TRL_VERSION}, and {installed} is installed: {how_to_install('trl')}"
        )


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_trl()
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
