"""A full node in this process over real p2pd, for tests with an honest and a hostile peer.

The workers are in this process too, so a step takes a fraction of a second. Patches of the package apply only to the
node: members run in a context in which `in_member` is set.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import ExitStack, asynccontextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessNodeFactory
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.node import daemon
from ftis_node.node.daemon import run_node
from ftis_node.node.loops.directory import DirectoryLoop
from ftis_node.node.loops.logprob_checks import AuditLoop
from ftis_node.node.loops.pull import PullLoop
from ftis_node.node.startup.factories import gossip_limits
from ftis_node.node.startup.run_plan import RunPlan
from ftis_node.node.startup.running_components import running_components
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.telemetry.faults import unhandled_errors
from tests.gossip.helpers import settings as network_settings
from tests.injection.injector import in_member
from tests.trained_models import trained_model
from tests.waiting import eventually

MANIFEST = RunManifest(
    name="injected",
    task="arithmetic",
    sampling={"group_size": 2, "max_prompt_tokens": 32, "max_completion_tokens": 6, "max_total_tokens": 48},
    step={"own_groups": 2, "foreign_groups": 4, "foreign_wait_s": 0.5, "other_tokenizers": "text"},
    optimizer={"learning_rate": 0.0001},
    eval={"every_steps": 0},
    wire={"announcement_shards": 1},
)
QUICK = {"check_s": 0.6, "poll_s": 0.1, "dial_timeout_s": 2.0}
START_S = 200.0  # a busy machine
CONSTANTS = {
    "node.loops.directory.MEMBER_LOOKUP_INTERVAL_S": 0.1, "node.loops.upkeep.PEERS_PERIOD_S": 0.05,
    "node.loops.announcement_backfill.PERIOD_S": 0.2, "node.loops.announcement_backfill.SILENCE_S": 0.5,
    "node.loops.status.PERIOD_S": 0.2, "node.loops.directory.RECORD_PERIOD_S": 0.5,
    "node.loops.pull.PULL_TIMEOUT_S": 5.0,
    "node.startup.factories.MAX_REQUESTS_PER_MINUTE": 100_000.0, "node.peers.announcements.GROUPS_PER_MINUTE": 60_000.0,
    "swarm.rate_limits.GROUPS_PER_MINUTE": 60_000.0, "swarm.rate_limits.NEW_PEERS_GROUPS_PER_MINUTE": 60_000.0,
    "swarm.rate_limits.TOKENS_PER_MINUTE": 1e9, "swarm.rate_limits.NEW_PEERS_TOKENS_PER_MINUTE": 1e9,
}  # fmt: skip


class NodeFactory(InProcessNodeFactory):
    """Workers in this process, and a real network."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LoopbackSwarm(), delay=NO_DELAY, seed=0)
        self._folder = folder

    def gossip(self, of: Any) -> Any:
        return Libp2pGossip(
            network_settings(self._folder / "node", **QUICK),
            identity=of.identity,
            run_id=of.manifest.run_id,
            limits=gossip_limits(of.settings, of.manifest),
        )


class Victim:
    """The interface to the node that `tests/attacks/member.py` uses."""

    def __init__(self, parts: NodeComponents) -> None:
        self._parts = parts

    async def addresses(self) -> list[str]:
        return self._parts.gossip.addresses

    async def until(self, condition: Callable[[], Any], *, within_s: float = 30.0) -> Any:
        return await eventually(condition, within_s=within_s)

    async def is_banned(self, peer_id: str) -> bool:
        return self._parts.peers.is_banned(peer_id)


class FullNode:
    """The running node and its loops. `task` ends when the node does."""

    def __init__(self) -> None:
        self.parts: NodeComponents
        self.pull: PullLoop
        self.directory: DirectoryLoop
        self.audit: AuditLoop
        self.faults: list[dict[str, Any]] = []
        self.unhandled: list[str] = []  # errors that would end the daemon

    async def run(self, home: Home, folder: Path, is_up: asyncio.Event) -> None:
        settings = NodeSettings(
            model=str(home.root.parent / "tiny"),
            engine="torch",
            device="cpu",
            swarm={"shutdown_serve_s": 0.0, "pull_policy": "all"},
            validation={"audit_fraction": 1.0, "audit_folders": True},
        )
        plan = RunPlan(MANIFEST, "arithmetic", ())
        async with running_components(settings, plan, home, NodeFactory(folder)) as self.parts:
            on_fault = self.parts.gossip.guard.on_fault
            assert on_fault is not None

            def record_fault(peer_id: str, place: Any, error: Exception) -> None:
                self.faults.append({"peer": peer_id, "place": place.value, "error": str(error)})
                on_fault(peer_id, place, error)

            self.parts.gossip.guard.on_fault = record_fault
            with ExitStack() as stack:
                stack.enter_context(unhandled_errors(lambda where, error: self.unhandled.append(f"{where}: {error!r}")))
                for name, value in CONSTANTS.items():
                    stack.enter_context(patch(f"ftis_node.{name}", value))
                wiring = Wiring(self.parts)
                self.pull, self.directory, self.audit = wiring.pull, wiring.directory_loop, wiring.audit_loop
                stack.enter_context(patch.object(daemon, "Wiring", lambda parts: wiring))
                is_up.set()
                await run_node(self.parts, steps=None)

    def accepted_of(self, peer_id: str) -> int:
        peer = self.parts.peers.registry.peers.get(peer_id)
        return peer.accepted if peer else 0

    def clear_penalties(self, peer_ids: Iterable[str]) -> None:
        """Clear bans and pauses of these peers, so that their values reach further points."""
        guard, peers = self.parts.gossip.guard, self.parts.peers
        for peer_id in peer_ids:
            if not peers.is_trusted(peer_id):
                peers.trust(peer_id)  # else it would soon be banned
        for pauses in (guard._pauses, self.pull._slots.backoff, self.pull.backfill._pauses):
            pauses.keep(())


def as_member(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task that the injector does not treat as part of the node."""
    context = copy_context()
    context.run(in_member.set, True)
    return asyncio.create_task(work, context=context)


async def stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running_node(home: Home, folder: Path) -> AsyncIterator[tuple[FullNode, asyncio.Task[None]]]:
    """Run the node in a separate task, with a tiny model beside its home. If it ends early, the task has the error."""
    shutil.copytree(trained_model("s", scale=0.01), home.root.parent / "tiny")
    home.create()
    node, is_up = FullNode(), asyncio.Event()
    task = asyncio.create_task(node.run(home, folder, is_up))
    try:
        await eventually(lambda: is_up.is_set() or task.done(), within_s=START_S)
        if task.done():
            task.result()
        yield node, task
    finally:
        await stop(task)


def maker_of(home: Home) -> GroupMaker:
    return GroupMaker(home.root.parent / "tiny", MANIFEST)
