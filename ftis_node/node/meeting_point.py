"""A bootstrap node: no model, no rollouts; an address book and relay for the nodes of any run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ftis_node.gossip.settings import NetworkSettings
from ftis_node.node.signals import until_signalled
from ftis_node.records.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.config.home import Home

ALL_INTERFACES = ("/ip4/0.0.0.0/tcp/0",)


def run_meeting_point(
    home: Home, *, listen: tuple[str, ...], peers: tuple[str, ...], show: Callable[[list[str]], None]
) -> None:
    """Serves until SIGINT or SIGTERM. `show` gets the dialable addresses as soon as they are.

    Raises ConfigError for a malformed address, HomeInUseError, UsageError for a taken port, MachineError.
    """
    with home.owned():
        settings = NetworkSettings(sockets_dir=home.sockets / "net", listen=listen or ALL_INTERFACES, peers=peers)
        asyncio.run(until_signalled(_serve(settings, Identity.load_or_create(home.identity), show)))


async def _serve(settings: NetworkSettings, identity: Identity, show: Callable[[list[str]], None]) -> None:
    from ftis_node.gossip.bootstrap import BootstrapNode

    node = BootstrapNode(settings, identity=identity)
    try:
        await node.start()
        show(node.addresses)
        await node.run_until_closed()
    finally:
        await node.close()
