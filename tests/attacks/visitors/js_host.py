"""A js-libp2p host, which is another program than p2pd in another language. It needs Node and a few npm packages."""

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
    """What is missing to run it, and how to get it; "" where nothing is."""
    if shutil.which("node") is None:
        return "the js-libp2p host needs Node 20 or later, and there is no `node` on the path"
    if not (FOLDER / "node_modules").is_dir():
        return f"the js-libp2p host needs its packages: run `npm ci` in {FOLDER}"
    return ""


class JsHost(Visitor):
    """Connects, identifies, pings, asks for protocols of its own, of IPFS and of the run, stays a while, leaves."""

    name = "js-libp2p host"

    async def visit(self, target: Target, folder: Path) -> int:
        names = [protocol(target.run_id, service) for service in RpcService]
        command = ("node", str(FOLDER / "visit.mjs"), target.address, *names)
        spoken = json.loads(await output_of(self.name, *command, within_s=LIMIT_S))["spoken"]
        return 4 + len(spoken)
