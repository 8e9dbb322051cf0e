"""Faults on a busy machine: a late answer, a refused stream or a process that ended earlier is no violation."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ftis_node.errors import FtisError
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.wire_format import RpcService
from tests.attacks.member import Member
from tests.chaos.fault_context import FaultContext
from tests.chaos.faults import processes as process_faults
from tests.chaos.faults.members import NUM_STREAMS, hold_streams
from tests.chaos.swarm import Swarm, SwarmNode
from tests.node.support import RunningNode, started

NOTHING: Any = None


class BusyMember(Member):
    """A member that cannot open streams to the victim, and whose victim does not answer the first request."""

    def __init__(self) -> None:
        self.num_refused = self.num_requests = 0
        self.requested_ids = set()
        self.gossip: Any = self

    @asynccontextmanager
    async def stream(self, service: RpcService, *, timeout_s: float = 30.0) -> AsyncIterator[Any]:
        self.num_refused += 1
        raise P2pdError("failed to open stream: context deadline exceeded")
        yield

    async def announce(self, claim: bytes) -> None:
        pass

    async def _is_banned(self) -> bool:
        self.num_requests += 1
        if self.num_requests == 1:
            raise FtisError("the node does not answer")
        return True


def test_refused_streams_are_accepted_and_a_busy_victim_is_asked_again() -> None:
    member = BusyMember()
    asyncio.run(hold_streams(NOTHING, NOTHING, member))
    assert member.num_refused == NUM_STREAMS + 1
    asyncio.run(member.announce_until_requested({b"id": b"claim"}))
    assert member.num_requests == 2


def ended_process() -> psutil.Process:
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as started_process:
        return psutil.Process(started_process.pid)


class NodeWithProcesses(SwarmNode):
    """A running node with another p2pd process at each call of `roles`."""

    is_running = True

    def __init__(self, home: Path, *found: psutil.Process) -> None:
        super().__init__("a", home, ("join",), NOTHING)
        self.found = list(found)

    def roles(self) -> dict[str, list[psutil.Process]]:
        return {"p2pd": [self.found.pop(0)]}


def test_a_process_that_has_ended_is_skipped_while_a_node_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon is killed first, and workers end with their daemon."""
    gone = ended_process()
    monkeypatch.setattr(RunningNode, "processes", lambda node: [gone, psutil.Process(node.process.pid)])
    with started(tmp_path / "home", "join", on=(sys.executable, "-c", "import time; time.sleep(60)")) as node:
        pass
    assert node.process.returncode == -9


def test_kill_waits_for_the_replacement_of_a_process_that_ended_before(tmp_path: Path) -> None:
    gone = ended_process()
    node = NodeWithProcesses(tmp_path, gone, psutil.Process())
    context = FaultContext(Swarm(tmp_path, {}), node, random.Random(0))
    process_faults.kill(context, role="p2pd")
    assert context.notes == [f"pid {gone.pid}"]
    assert not node.found
