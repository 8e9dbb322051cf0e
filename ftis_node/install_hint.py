"""How to install an optional part of ftis-node, for all messages.

No package index has ftis-node. A message that names the project to pip would install the package of anyone who
registers that name. So every hint names a clone.
"""

from __future__ import annotations

from typing import Final

INSTALL_VLLM: Final = "run `make setup-vllm` in the clone of ftis-node"


def how_to_install(extra: str) -> str:
    """Return the instruction that installs an extra of pyproject.toml."""
    return f"""run `pip install -e ".[{extra}]"` in the clone of ftis-node"""
