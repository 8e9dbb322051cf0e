"""Light nodes in one process for tests: whole loops over the loopback swarm, without models or workers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.stubs.stub_node import StubNode, stub_group, stub_prompt
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import RecordError
from ftis_node.gossip import Gossip
from ftis_node.gossip.loopback import LoopbackGossip, LoopbackSwarm
from ftis_node.node.loops import directory, publish, pull
from ftis_node.node.peers.group_requests import announcement_of
from ftis_node.records.codec import hash_messages
from ftis_node.records.envelope import Announcement, open_announcement
from ftis_node.records.group import PromptRef
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import open_backfill_request
from tests.waiting import eventually

ANNOUNCED, REQUESTED = "announced", "backfill_requested"
RNG = np.random.default_rng(0)


def manifest_of(**step: Any) -> RunManifest:
    return RunManifest(name="light", task="gsm8k", step={"own_groups": 4, "foreign_groups": 4} | step)


def identity_of(number: int) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)


def held(node: StubNode) -> int:
    """Return the number of foreign groups in a node's buffer."""
    return node.parts.store.reader.figures().groups_foreign


def own_announcement(node: StubNode) -> Announcement:
    (group_id,) = node.parts.store.reader.own_ready()
    kept = node.parts.store.reader.held(group_id)
    assert kept is not None
    return announcement_of(kept, node.parts.context.about)


class LightSwarm:
    """A swarm of light nodes with numbers; `loses` drops a message by sender, receiver, kind and content.

    Small groups wait up to `window_s` for others of the same announcement.
    """

    def __init__(self, folder: Path, manifest: RunManifest, *, window_s: float = 1e-9) -> None:
        self._folder, self._window_s = folder, window_s
        self.manifest = manifest
        self.loses: Callable[[int, int, str, Any], bool] = lambda *_: False
        self._swarm = LoopbackSwarm(loses=self._decide)
        self._numbers = {identity_of(number).peer_id: number for number in range(64)}

    def join(self, number: int) -> LoopbackGossip:
        num_shards = self.manifest.wire.announcement_shards
        return self._swarm.join(identity_of(number).peer_id, run_id=self.manifest.run_id, num_shards=num_shards)

    @asynccontextmanager
    async def node(
        self,
        number: int,
        *,
        domain: str = "",
        gossip: Gossip | None = None,
        directory_period_s: float = 0.2,
        pulls_in_flight: int = pull.PULLS_IN_FLIGHT,
        **swarm: Any,
    ) -> AsyncIterator[StubNode]:
        """Run a node with these settings of its section `swarm`; `gossip` replaces the loopback network."""
        home = Home(self._folder / str(number))
        home.create()
        settings = NodeSettings(model="none", swarm={"shutdown_serve_s": 0} | swarm)
        with (
            patch.object(directory, "RECORD_PERIOD_S", directory_period_s),
            patch.object(pull, "PULLS_IN_FLIGHT", pulls_in_flight),
            patch.object(publish, "WINDOW_S", self._window_s),
        ):
            node = StubNode(
                home, identity_of(number), gossip or self.join(number),
                manifest=self.manifest, settings=settings, on_event=lambda name, fields: None, domain=domain,
            )  # fmt: skip
            _ = node.wiring.pull, node.wiring.directory_loop, node.wiring.publish_loop  # they read the constants
        await node.start()
        try:
            yield node
        finally:
            await node.close()

    async def publish(self, node: StubNode, count: int = 1, *, task: str = "", num_tokens: int = 4) -> None:
        """Publish groups of a node, of its `task` if there is one; return when they are announced."""
        before = node.parts.context.counters.groups_sent
        for index in range(count):
            group = stub_group(node.parts.context.identity, self.manifest, RNG, num_tokens=num_tokens)
            ref = PromptRef(task, "train", index) if task else group.prompt_ref
            await node.publish(replace(group, prompt_ref=ref, problem_hash=hash_messages(stub_prompt(ref))))
        await eventually(lambda: node.parts.context.counters.groups_sent == before + count)

    def _decide(self, sender: str, receiver: str, payload: bytes) -> bool:
        numbers = self._numbers[sender], self._numbers[receiver]
        for kind, parse in ((ANNOUNCED, open_announcement), (REQUESTED, open_backfill_request)):
            try:
                message = parse(payload)
            except RecordError:
                continue
            return self.loses(*numbers, kind, message)
        return self.loses(*numbers, "request", payload)
