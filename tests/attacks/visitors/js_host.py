"""A js-libp2p host: another implementation of libp2p. It needs Node.js and a few npm packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.gossip.wire_format import RpcService, protocol
from tests.attacks.visitors.host import Visitor, output_of

if TYPE_CHECKING:
    from tests.attacks.visitors.host import Target

FOLDER = Path(__file__).with_name("js")
LIMIT_S = 60.0


def missing() -> str:
    """Return what is missing to run it and how to get it, or "" if nothing is."""
    if shutil.which("node") is None:
        return "the js-libp2p host needs Node.js 20 or later, and PATH has no `node`"
    if not (FOLDER / "node_modules").is_dir():
        return f"the js-libp2p host needs its packages: run `npm ci` in {FOLDER}"
    return ""


class JsHost(Visitor):
    """A host that identifies, pings, and requests its own protocols, those of IPFS and those of the run."""

    name = "js-libp2p host"

    async def visit(self, target: Target, folder: Path) -> int:
        names = [protocol(target.run_id, service) for service in RpcService]
        command = ("node", str(FOLDER / "visit.mjs"), target.address, *names)
        supported = json.loads(await output_of(self.name, *command, within_s=LIMIT_S))["supported"]
        return 4 + len(supported)
