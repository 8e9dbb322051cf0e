"""The nodes of `bench/gossip.py`, a few in each process, which share the cores like processes of nodes.

The parent calls methods of `Nodes` by name over a pipe, one at a time, and receives their results.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from ftis_node.backoff import ExponentialBackoff
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings, SwarmSection
from ftis_node.config.step import StepSection
from ftis_node.gossip import GossipLimits, NetworkSettings
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.p2pd.session import CONTROL_NAME
from ftis_node.records.identity import Identity
from nodes.bare import BareNode
from stubs.stub_node import StubNode, stub_group

NUM_TOKENS = 674  # of each of 12 completions: 64 KiB
WINDOW = 16  # the most groups that a node publishes before it has stored as many of each other one
NUM_TARGET_MEMBERS = 8
CHECK_S = 60.0  # a node's own default
SURVIVAL_CHECK_S = 10.0  # of a swarm with constant churn
MEASURED_NODES = 8
AWAY_S = 2.0
ANY_PORT = "/ip4/127.0.0.1/tcp/0"


def log_line(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


class Stored(NamedTuple):
    """A node stored a group. `at` is in seconds of the machine's monotonic clock, which all processes share."""

    group: bytes
    sender: str
    peer_id: str
    num_tokens: int
    at: float


class Member:
    """One node over its restarts, with the groups that it stored and published."""

    def __init__(self, folder: Path, *, num_nodes: int, num_tokens: int) -> None:
        self.identity = Identity.generate()
        self.manifest = RunManifest(name="bench", task="gsm8k", step=StepSection(own_groups=0, foreign_groups=4096))
        self.stored: list[Stored] = []
        self.num_foreign = 0
        self.published_at: list[float] = []
        self.node: StubNode | None = None
        self._home = Home(folder)
        self._num_nodes = num_nodes
        self._num_tokens = num_tokens
        self._rng = np.random.default_rng(int(folder.name))
        self._changed = asyncio.Event()
        self.is_here = asyncio.Event()
        self.is_here.set()

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    async def start(self, peers: tuple[str, ...]) -> str:
        self._home.create()
        settings = NodeSettings(model="none", peers=peers, listen=(ANY_PORT,), swarm=SwarmSection(pull_policy="all"))
        network = NetworkSettings(
            sockets_dir=self._home.sockets / "net",
            listen=settings.listen,
            peers=peers,
            use_nat_helpers=False,
            num_target_members=min(NUM_TARGET_MEMBERS, self._num_nodes - 1),
            check_s=CHECK_S if self._num_nodes <= MEASURED_NODES else SURVIVAL_CHECK_S,
            retry=ExponentialBackoff(first_s=0.5, ceiling_s=2.0),
        )
        limits = GossipLimits(max_envelope_bytes=self.manifest.wire.max_envelope_bytes)
        gossip = Libp2pGossip(network, identity=self.identity, run_id=self.manifest.run_id, limits=limits)
        self.node = StubNode(
            self._home, self.identity, gossip, manifest=self.manifest, settings=settings, on_event=self._on_event
        )
        await self.node.start()
        return gossip.addresses[0]

    def bare(self) -> BareNode:
        """Return the plain calls on the same p2pd."""
        return BareNode(self.peer_id, self._home.sockets / "net" / CONTROL_NAME)

    async def publish(self) -> None:
        group = stub_group(self.identity, self.manifest, self._rng, num_tokens=self._num_tokens)
        self.published_at.append(time.monotonic())
        await self.node.publish(group)

    async def take_part(self, number: int) -> None:
        """Publish `number` groups and wait until the same number of each other node is stored."""
        before, num_others = self.num_foreign, self._num_nodes - 1
        for sent in range(number):
            await self._until_foreign(before + (sent - WINDOW) * num_others)
            await self.publish()
        await self._until_foreign(before + number * num_others)

    async def _until_foreign(self, target: int) -> None:
        while self.num_foreign < target:
            self._changed.clear()
            await self._changed.wait()

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if event == "refused":
            log_line(f"{self.peer_id[-6:]} refuses: {fields['reason']} {fields['detail']}")
        if event == "admitted":
            stored = Stored(fields["group"], fields["sender"], self.peer_id, fields["num_tokens"], time.monotonic())
            self.stored.append(stored)
            self.num_foreign += stored.sender != self.peer_id
            self._changed.set()


class Nodes:
    """The nodes of one process, with the methods that the parent calls."""

    def __init__(self, folders: list[Path], *, num_nodes: int, num_tokens: int) -> None:
        self._members = [Member(folder, num_nodes=num_nodes, num_tokens=num_tokens) for folder in folders]
        self._bare: list[BareNode] = []
        self._publishing: asyncio.Future[Any] | None = None

    async def start(self, peers: tuple[str, ...], first: int, count: int) -> list[str]:
        """Start some of the nodes, and return their addresses."""
        return await asyncio.gather(*(member.start(peers) for member in self._members[first : first + count]))

    async def num_members(self) -> list[int]:
        return [len(await member.node.gossip.members()) for member in self._members]

    async def peer_ids(self) -> list[str]:
        return [member.peer_id for member in self._members]

    async def publish_evenly(self, seconds: float, period_s: float) -> None:
        """Let each node publish once per period."""
        await _evenly(self._members, seconds, period_s, lambda member, turn: member.publish())

    async def our_round(self, number: int, within_s: float) -> bool:
        """Let every node publish `number` groups and store those of all others. Return whether it ended in time."""
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(member.take_part(number) for member in self._members))
        except TimeoutError:
            return False
        return True

    async def cpu_s(self) -> tuple[float, float]:
        """Return the processor seconds so far, of this process and of its p2pds."""
        p2pds = [psutil.Process(member.node.gossip.process_id).cpu_times() for member in self._members]
        return time.process_time(), sum(times.user + times.system for times in p2pds)

    async def written_bytes(self) -> int:
        """Return the bytes that this process has written to disks."""
        return psutil.Process().io_counters().write_bytes

    async def envelope_bytes(self) -> int:
        (envelope,) = self._members[0].node.parts.store.reader.envelopes([self._members[0].stored[0].group])
        return len(envelope)

    async def stored(self) -> list[Stored]:
        return [stored for member in self._members for stored in member.stored]

    async def published_at(self) -> dict[str, list[float]]:
        return {member.peer_id: member.published_at for member in self._members}

    async def start_bare(self, peer_ids: list[str]) -> None:
        self._bare = [member.bare() for member in self._members]
        for node in self._bare:
            await node.start(peer_ids)

    async def hold_bare(self, number: int, size: int) -> None:
        for node in self._bare:
            node.bodies = [os.urandom(size) for _ in range(number)]

    async def announce_bare_evenly(self, seconds: float, period_s: float) -> None:
        await _evenly(self._bare, seconds, period_s, lambda node, turn: node.announce(turn % len(node.bodies)))

    async def bare_round(self) -> None:
        await asyncio.gather(*(node.call_for_all() for node in self._bare))

    async def bare_latencies_s(self) -> list[float]:
        return [latency for node in self._bare for latency in node.latencies_s]

    async def begin_publishing(self, number: int, period_s: float) -> None:
        """Let every node publish independently, also while some are stopped."""
        self._publishing = asyncio.gather(*(self._publish(member, number, period_s) for member in self._members))

    async def end_publishing(self) -> None:
        await self._publishing

    async def kill(self, at: int, peers: tuple[str, ...], whole: bool) -> str:
        """Kill the p2pd of a node, which restarts it, or close the `whole` node and start it again."""
        member = self._members[at]
        os.kill(member.node.gossip.process_id, signal.SIGKILL)
        if whole:
            member.is_here.clear()
            await member.node.close()
            await asyncio.sleep(AWAY_S)
            await member.start(peers)
            member.is_here.set()
        return member.peer_id

    async def counters(self) -> dict[str, str]:
        return {member.peer_id: repr(member.node.gossip.counters) for member in self._members}

    async def num_announcements_sent(self) -> int:
        return sum(member.node.gossip.counters.announcements_sent for member in self._members)

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self._bare))
        await asyncio.gather(*(member.node.close() for member in self._members if member.node))

    async def _publish(self, member: Member, number: int, period_s: float) -> None:
        for _ in range(number):
            await member.is_here.wait()
            await member.publish()
            await asyncio.sleep(period_s)


async def _evenly(nodes: list[Any], seconds: float, period_s: float, work: Any) -> None:
    pause_s = period_s / len(nodes)
    for turn in range(int(seconds / pause_s)):
        await work(nodes[turn % len(nodes)], turn // len(nodes))
        await asyncio.sleep(pause_s)


class Host:
    """The parent's connection to one process of nodes."""

    def __init__(self, folders: list[Path], *, num_nodes: int, num_tokens: int = NUM_TOKENS) -> None:
        context = multiprocessing.get_context("spawn")
        self.num_nodes = len(folders)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, folders, num_nodes, num_tokens), daemon=False)
        self._process.start()
        theirs.close()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call the method of `Nodes` and return its result. Raises EOFError if the process has died."""
        self._pipe.send((name, arguments))
        return await asyncio.to_thread(self._pipe.recv)

    async def end(self) -> None:
        """Close the nodes and wait for the process."""
        self._pipe.close()
        await asyncio.to_thread(self._process.join)


def _run(pipe: Any, folders: list[Path], num_nodes: int, num_tokens: int) -> None:
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(_serve(pipe, Nodes(folders, num_nodes=num_nodes, num_tokens=num_tokens)))


async def _serve(pipe: Any, nodes: Nodes) -> None:
    try:
        while True:
            try:
                name, arguments = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            pipe.send(await getattr(nodes, name)(*arguments))
    finally:
        await nodes.close()


async def call_all(hosts: list[Host], name: str, *arguments: Any) -> list[Any]:
    """Call the same method in all processes at the same time."""
    return await asyncio.gather(*(host.call(name, *arguments) for host in hosts))


def merged(stored: list[list[Stored]]) -> dict[bytes, list[Stored]]:
    """Return the stored groups of all processes by group."""
    groups: dict[bytes, list[Stored]] = defaultdict(list)
    for item in (item for part in stored for item in part):
        groups[item.group].append(item)
    return groups
