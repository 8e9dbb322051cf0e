"""A node without a model, with real network, loops, validation and buffer. The caller supplies groups.

It measures the costs and failures of a swarm with many nodes on one machine. It has no engine and no learner, and every
completion scores 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip import Gossip
from ftis_node.node.context import NodeContext, NodeDescription, NodeState
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.storage.node_store import DiskThread, Store
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import NullGeneration, NullLearner
from ftis_node.records.codec import hash_messages, hash_prompt
from ftis_node.records.group import CompletionStatus, Group, PromptRef
from ftis_node.records.identity import Identity
from ftis_node.records.token_batch import TokenBatch
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.tasks.base import ChatMessage, TaskItem
from ftis_node.telemetry.events import EventLog
from stubs.wire_groups import VOCABULARY, random_group

OnEvent = Callable[[str, dict[str, Any]], None]


log = logging.getLogger(__name__)

PROMPT_IDS = [0]
FINGERPRINT = "0" * 32  # the fingerprint in groups of `stub_group`
UNBOUNDED = 1 << 30


def stub_prompt(ref: PromptRef) -> tuple[ChatMessage]:
    """Return the messages of a problem; each reference has other ones."""
    return (ChatMessage(role="user", content=str(ref)),)


class StubTask:
    """Task stub: resolves any prompt reference."""

    isolate_scoring = False

    def resolve(self, ref: PromptRef) -> TaskItem:
        return TaskItem(ref, stub_prompt(ref), "")


class StubScorer:
    async def resolve(self, ref: PromptRef, *, cost: object = None) -> TaskItem:
        return StubTask().resolve(ref)

    async def score(
        self, item: TaskItem, texts: Sequence[str], *, cost: object = None
    ) -> list[tuple[float, CompletionStatus]]:
        return [(0.0, CompletionStatus.SCORED) for _ in texts]

    def is_episode(self, item: TaskItem) -> bool:
        return False


class StubTokenizer:
    """Tokenizer stub without text."""

    fingerprint = FINGERPRINT
    num_ids = vocab_size = VOCABULARY
    end_ids = (VOCABULARY,)

    def encode_prompt(self, messages: Sequence[object], *, opening: str | None = None) -> list[int]:
        return PROMPT_IDS

    def answer_texts(self, tokens: TokenBatch, finish_reasons: object, *, opening: str = "") -> list[str]:
        return [self.decode(ids.tolist()) for ids in tokens.ids_of_each()]

    def decode(self, ids: Sequence[int]) -> str:
        return ""


class ObservedEventLog(EventLog):
    """Event log that also calls a function for each event."""

    def __init__(self, path: Path, on_event: OnEvent) -> None:
        super().__init__(path)
        self._on_event = on_event

    def write(self, event: str, **fields: Any) -> None:
        """Call the function, then write the line."""
        self._on_event(event, fields)
        super().write(event, **fields)


def stub_components(
    stack: ExitStack | AsyncExitStack,
    home: Home,
    identity: Identity,
    gossip: Gossip,
    *,
    manifest: RunManifest,
    settings: NodeSettings,
    events: EventLog,
    domain_spec: str = "",
    buffer: ReplayBuffer | None = None,
    peers_type: type[PeerManager] = PeerManager,
    context: NodeContext | None = None,
    **others: Any,
) -> NodeComponents:
    """Return components without a model on an existing home, closed with `stack`. `others` take the place of stubs."""
    disk, buffer, reader = DiskThread(), buffer or ReplayBuffer(home.replay), ReplayReader(home.replay)
    if context is None:
        about = NodeDescription(identity.peer_id[-8:], "none", StubTokenizer.fingerprint, domain_spec)
        context = NodeContext(settings, manifest, identity, events, NodeState(), about)
    peers = peers_type(
        home.peers, own_id=identity.peer_id, settings=settings.access, events=events, counters=context.counters
    )
    for part in (events, disk, buffer, reader, peers):
        stack.callback(part.close)
    gossip.guard.on_fault = peers.charge_fault
    stubs: dict[str, Any] = {
        "source": None,
        "tokenizer": StubTokenizer(),
        "task": StubTask(),
        "domain": StubTask(),
        "scorer": StubScorer(),
        "new_peers_scorer": StubScorer(),
        "slots": SlotPool(UNBOUNDED),
    }
    return NodeComponents(
        **stubs | others,
        context=context,
        store=Store(context, home, buffer, reader, disk),
        eval_tasks=(),
        generation=NullGeneration(lambda: 0),
        learner=NullLearner(0),
        gossip=gossip,
        peers=peers,
    )


class StubNode:
    """One node with a given identity. It starts and closes `gossip`; a closed node cannot be restarted."""

    def __init__(
        self,
        home: Home,
        identity: Identity,
        gossip: Gossip,
        *,
        manifest: RunManifest,
        settings: NodeSettings,
        on_event: OnEvent,
        domain: str = "",
    ) -> None:
        """Open the home's buffer, which may hold older groups. `domain` is a part of the run's mixture."""
        self.gossip = gossip
        self._stack = AsyncExitStack()
        events = ObservedEventLog(home.events, on_event)
        self.parts = stub_components(
            self._stack, home, identity, gossip, manifest=manifest, settings=settings, events=events, domain_spec=domain
        )
        self.wiring = Wiring(self.parts)
        self.wiring.scored = asyncio.Queue()
        self._runner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join the swarm and run the loops. Raises the errors of `Gossip.start`."""
        self.wiring.serve_peers()
        await self.gossip.start()
        self._runner = asyncio.create_task(self._run(), name="light-node")

    async def publish(self, group: Group) -> None:
        """Pass a group to the publish loop, as the generate loop would."""
        await self.parts.slots.charge()
        await self.wiring.scored.put(replace(group, created_at=time.time()))

    async def close(self) -> None:
        """Leave the swarm and close the buffer. Raises the error of a loop."""
        async with self._stack:
            await self.gossip.close()
            if self._runner is not None:
                self._runner.cancel()
                await asyncio.wait({self._runner})
                if not self._runner.cancelled():
                    self._runner.result()

    @property
    def is_running(self) -> bool:
        """Return whether the node was started and no loop has ended."""
        return self._runner is not None and not self._runner.done()

    async def _run(self) -> None:
        wiring = self.wiring
        async with asyncio.TaskGroup() as tasks:
            for loop in (
                wiring.intake,
                wiring.pull,
                wiring.publish_loop,
                wiring.reannounce_loop,
                wiring.shards_loop,
                wiring.directory_loop,
            ):
                tasks.create_task(loop.run(), name=type(loop).__name__)


def stub_group(identity: Identity, manifest: RunManifest, rng: np.random.Generator, *, num_tokens: int) -> Group:
    """Return a group that passes a stub node's validation; the publish loop numbers it."""
    group = random_group(identity, 1, rng, num_tokens=num_tokens)
    ref = PromptRef(manifest.task, "train", int(rng.integers(1 << 30)))
    return replace(
        group,
        run_id=manifest.run_id,
        prompt_ref=ref,
        problem_hash=hash_messages(stub_prompt(ref)),
        prompt_hash=hash_prompt(PROMPT_IDS),
        rewards=(0.0,) * len(group.rewards),
    )
