"""A function that starts real nodes, each in a separate folder."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from ftis_node.gossip.bootstrap_node import BootstrapNode
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.records.identity import Identity
from tests.gossip.helpers import settings

Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path):
    """Yield the function. It closes all nodes at the end. Without a `run_id` it starts a bootstrap node."""
    async with AsyncExitStack() as stack:

        async def start(*, identity=None, run_id="r", limits=None, secret=None, **changes):
            identity = identity or Identity.generate()
            chosen = settings(tmp_path / identity.peer_id[-6:], **changes)
            node: Any
            if run_id is None:
                node = BootstrapNode(chosen, identity=identity)
            else:
                node = Libp2pGossip(chosen, identity=identity, run_id=run_id, limits=limits, secret=secret)
            stack.push_async_callback(node.close)
            await node.start()
            return node

        yield start
