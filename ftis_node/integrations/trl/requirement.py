"""The one release of TRL that the trainer subclasses."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from ftis_node.errors import UsageError

TRL_VERSION: Final = "1.16.0"  # as in the extra `trl` of pyproject.toml


def require_trl() -> None:
    """Raise UsageError unless the supported release of TRL is installed."""
    try:
        installed = f"trl {version('trl')}"
    except PackageNotFoundError:
        installed = "no trl"
    if installed != f"trl {TRL_VERSION}":
        raise UsageError(
            f"ftis_node.integrations.trl needs trl {TRL_VERSION}, and {installed} is installed:"
            " run `pip install 'ftis-node[trl]'`"
        )
