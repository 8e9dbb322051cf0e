"""The process of a bootstrap node: DHT entry point and relay for the nodes of any run, without a model or groups.

A watchdog checks its event loop, as in a full node. It ends a process whose loop is blocked for ten minutes, so that a
supervisor can restart it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ftis_node.bootstrap.http_api import BootstrapApi
from ftis_node.config.home import Home
from ftis_node.gossip.bootstrap_node import BootstrapNode
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.node.startup.home_opening import opened_home
from ftis_node.node.supervision.process_limits import allow_open_files
from ftis_node.node.supervision.shutdown import until_signalled
from ftis_node.node.supervision.watchdog import Watchdog, service_manager
from ftis_node.records.identity import Identity
from ftis_node.telemetry.secrets import keep_secret

log = logging.getLogger(__name__)
ALL_INTERFACES = ("/ip4/0.0.0.0/tcp/0",)


def run_bootstrap_node(
    home: Home,
    *,
    listen: tuple[str, ...],
    peers: tuple[str, ...],
    announce: tuple[str, ...] = (),
    show: Callable[[list[str]], None],
    status_port: int = 0,
    runs: tuple[str, ...] = (),
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. `show` gets the dialable addresses as soon as they are known.

    `announce` are the addresses to announce in place of the discovered ones, without `/p2p/ID`. `runs` are ids of runs
    that its page shows first.

    Raise ConfigError for a malformed address, UsageError for a home in use or a taken port, MachineError.
    """
    allow_open_files()
    with opened_home(home):
        settings = NetworkSettings(
            sockets_dir=home.sockets / "net", listen=listen or ALL_INTERFACES, announce=announce, peers=peers
        )
        identity = Identity.load_or_create(home.identity)
        keep_secret(identity.seed)
        node = BootstrapNode(settings, identity=identity, pinned_runs=runs)
        api = BootstrapApi(node)
        asyncio.run(until_signalled(_serve(node, show, api, home=home, status_port=status_port)))


async def _serve(
    node: BootstrapNode, show: Callable[[list[str]], None], api: BootstrapApi, *, home: Home, status_port: int
) -> None:
    with Watchdog(manager=service_manager()).watching():
        try:
            await node.start()
            async with api.serve(port=status_port) as url:
                home.publish_address(url)
                log.info("the page of this bootstrap node is at %s", url)
                show(node.addresses)
                await node.run_until_closed()
        finally:
            await node.close()
