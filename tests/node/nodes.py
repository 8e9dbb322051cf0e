"""Real components of one node for tests of its loops: files in a folder, a network in this process, no workers.

Tests replace single components by subclasses of the real ones that record, or answer as told.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.stub_node import StubScorer, StubTask, StubTokenizer
from ftis_node.models import ModelSource
from ftis_node.node.components import NodeComponents
from ftis_node.node.context import NodeContext, NodeCounters, NodeDescription, NodeState
from ftis_node.node.peers.manager import PeerManager, fault_charger
from ftis_node.node.peers.registry import PeerRegistry
from ftis_node.node.peers.serve import Confirmations
from ftis_node.node.protocols import NullGeneration, NullLearner
from ftis_node.node.supervision.background import DiskThread
from ftis_node.node.training.evaluation import EvaluationHistory
from ftis_node.node.training.group_limits import SlotPool
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.telemetry.events import EventLog, read_events
from tests.node.support import manifest_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftis_node.config.manifest import RunManifest
    from ftis_node.gossip import Gossip
    from ftis_node.replay.lifecycle import ReleaseReason
    from ftis_node.swarm.reputation import Behaviour
    from ftis_node.tasks.base import Task

ME = Identity.from_seed(bytes([9]) * 32)
MODEL = "org/tiny"


class RecordingPeers(PeerManager):
    """The real peer manager; `notes` has what it was told, in order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.notes: list[tuple[str, Behaviour, str]] = []
        super().__init__(*arguments, **options)

    def note(self, peer_id: str, conduct: Behaviour, *, reason: str = "", detail: str = "") -> None:
        self.notes.append((peer_id, conduct, reason))
        super().note(peer_id, conduct, reason=reason, detail=detail)


class RecordingBuffer(ReplayBuffer):
    """The real buffer; keeps which steps were released and reconciled."""

    def __init__(self, path: Path) -> None:
        self.released: list[tuple[int, ReleaseReason]] = []
        self.reconciled: list[int] = []
        super().__init__(path)

    def release_step(self, step: int, reason: Any) -> None:
        self.released.append((step, reason))
        super().release_step(step, reason)

    def reconcile(self, step: int, last_groups: Any = None) -> int:
        self.reconciled.append(step)
        return super().reconcile(step, last_groups)


@contextmanager
def components(
    folder: Path,
    *,
    identity: Identity = ME,
    settings: NodeSettings | None = None,
    manifest: RunManifest | None = None,
    gossip: Gossip | None = None,
    model: str = MODEL,
    domain: str = "",
    domain_task: Task | None = None,
    state: NodeState | None = None,
    **changes: Any,
) -> Iterator[NodeComponents]:
    """Components on a home in `folder`, closed when the block ends; `changes` replace those of these names."""
    settings = settings or NodeSettings(model="m", dtype="float32")
    manifest = manifest or parse_manifest(manifest_text(foreign_wait_s=1), source="test")
    home = Home(folder)
    home.create()
    home.weights.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        events, disk = EventLog(home.events), DiskThread()
        buffer, reader = RecordingBuffer(home.replay), ReplayReader(home.replay)
        peers = RecordingPeers(home.peers, own_id=identity.peer_id, settings=settings.admission, events=events)
        for part in (events, disk, buffer, reader, peers):
            stack.callback(part.close)
        registry, generation = PeerRegistry(), NullGeneration(lambda: 0)
        tokenizer: Any = changes.get("tokenizer", StubTokenizer())
        task: Any = changes.get("task", StubTask())
        scorer: Any = StubScorer()
        if gossip is None:
            num_shards = manifest.wire.announcement_shards
            gossip = LoopbackSwarm().join(identity.peer_id, run_id=manifest.run_id, num_shards=num_shards)
        node = NodeComponents(
            context=NodeContext(settings, manifest, identity, events, state or NodeState()),
            about=NodeDescription(name="node", model=model, tokenizer=tokenizer.fingerprint, domain=domain),
            home=home,
            source=ModelSource(name=model, folder=folder),
            tokenizer=tokenizer,
            task=task,
            domain=domain_task or task,
            eval_tasks=(),
            scorer=scorer,
            new_peers_scorer=scorer,
            generation=generation,
            learner=NullLearner(0),
            gossip=gossip,
            buffer=buffer,
            reader=reader,
            disk=disk,
            slots=SlotPool(8),
            counters=NodeCounters(),
            registry=registry,
            confirmations=Confirmations(registry),
            evaluations=EvaluationHistory(),
            peers=peers,
        )
        gossip.guard.on_fault = fault_charger(events=events, counters=node.counters, registry=registry, peers=peers)
        yield replace(node, **changes)


def events_of(node: NodeComponents, *names: str) -> list[dict[str, Any]]:
    """The node's events so far; with `names`, those alone."""
    return [event for event in read_events(node.home.events) if not names or event["event"] in names]


def notes_of(node: NodeComponents) -> list[tuple[str, Behaviour, str]]:
    """What the node's peer manager was told."""
    assert isinstance(node.peers, RecordingPeers)
    return node.peers.notes


def buffer_of(node: NodeComponents) -> RecordingBuffer:
    """The node's buffer, with what it records."""
    assert isinstance(node.buffer, RecordingBuffer)
    return node.buffer
