"""Real components of one node for tests: files in a folder, a network in this process, with or without workers.

Tests replace single components by subclasses of the real ones that record calls or return fixed results.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.stubs.stub_node import StubTask, StubTokenizer, stub_components
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip import Gossip
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.models import ModelSource
from ftis_node.node.context import NodeContext, NodeDescription, NodeState
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.startup.run_plan import RunPlan
from ftis_node.node.startup.running_components import running_components
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.wiring import NodeComponents
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.reputation import Behaviour
from ftis_node.tasks.base import Task
from ftis_node.telemetry.events import EventLog, read_events
from ftis_node.telemetry.log import unwatched
from tests.node.support import manifest_text

ME = Identity.from_seed(bytes([9]) * 32)
MODEL = "org/tiny"


class RecordingPeers(PeerManager):
    """The real peer manager; `notes` has the noted behavior of peers, in order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.notes: list[tuple[str, Behaviour, str]] = []
        super().__init__(*arguments, **options)

    def note(self, peer_id: str, behaviour: Behaviour, *, reason: str = "", **details: Any) -> None:
        self.notes.append((peer_id, behaviour, reason))
        super().note(peer_id, behaviour, reason=reason, **details)


class RecordingBuffer(ReplayBuffer):
    """The real buffer; it records the steps that were released and reconciled."""

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
    """Yield the components of a node with its home in `folder`; `changes` replace parts by name, also of the store."""
    settings = settings or NodeSettings(model="m", dtype="float32")
    manifest = manifest or parse_manifest(manifest_text(foreign_wait_s=1), source="test")
    home = Home(folder)
    home.create()
    home.weights.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        tokenizer: Any = changes.get("tokenizer", StubTokenizer())
        task: Any = changes.get("task", StubTask())
        if gossip is None:
            num_shards = manifest.wire.announcement_shards
            gossip = LoopbackSwarm().join(identity.peer_id, run_id=manifest.run_id, num_shards=num_shards)
        events = EventLog(home.events)
        about = NodeDescription("node", model, tokenizer.fingerprint, domain)
        node = stub_components(
            stack,
            home,
            identity,
            gossip,
            manifest=manifest,
            settings=settings,
            events=events,
            buffer=RecordingBuffer(home.replay),
            peers_type=RecordingPeers,
            context=NodeContext(settings, manifest, identity, events, state or NodeState(), about),
            source=ModelSource(name=model, folder=folder),
            domain=domain_task or task,
            slots=SlotPool(8),
        )
        store = replace(node.store, **{name: changes.pop(name) for name in ("disk", "space") if name in changes})
        yield replace(node, store=store, **changes)


@asynccontextmanager
async def whole_node(
    home: Home,
    model: Path,
    makers: Any,
    *,
    manifest: RunManifest | None = None,
    eval_specs: Any = (),
    on_progress: Any = unwatched,
    **settings: Any,
) -> AsyncIterator[NodeComponents]:
    """Yield the components of a node on this home with a real engine and learner; its loops do not run yet."""
    given = {"model": str(model), "engine": "torch", "device": "cpu", "swarm": {"shutdown_serve_s": 0.0}} | settings
    plan = RunPlan(
        manifest or parse_manifest(manifest_text(foreign_wait_s=0.1), source="test"), "arithmetic", eval_specs
    )
    async with running_components(
        NodeSettings.model_validate(given), plan, home, makers, on_progress=on_progress
    ) as parts:
        yield parts


def events_of(node: NodeComponents, *names: str) -> list[dict[str, Any]]:
    """Return the node's events; with `names`, only those."""
    return [event for event in read_events(node.home.events) if not names or event["event"] in names]


def notes_of(node: NodeComponents) -> list[tuple[str, Behaviour, str]]:
    """Return what the node's peer manager noted: peer id, behavior and reason."""
    assert isinstance(node.peers, RecordingPeers)
    return node.peers.notes


def buffer_of(node: NodeComponents) -> RecordingBuffer:
    assert isinstance(node.store.buffer, RecordingBuffer)
    return node.store.buffer
