"""Faults on a busy machine: what is late or ends too early for them is no violation."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from ftis_node.errors import FtisError
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.records.identity import Identity
from tests.attacks.member import Member
from tests.attacks.victim import Victim
from tests.chaos.faults import processes as process_faults
from tests.chaos.faults.hostile import NUM_STREAMS, Attack, hold_streams
from tests.chaos.scene import Scene
from tests.chaos.swarm import Swarm, SwarmNode
from tests.node.support import RunningNode, started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from bench.stubs.group_maker import GroupMaker
    from ftis_node.gossip.wire_format import RpcService


class MemberWithoutStreams(Member):
    """A member whose streams to the victim are not opened."""

    def __init__(self) -> None:
        self.num_refused = 0

    @asynccontextmanager
    async def stream(self, service: RpcService, *, timeout_s: float = 30.0) -> AsyncIterator[Any]:
        self.num_refused += 1
        raise P2pdError("failed to open stream: context deadline exceeded")
        yield


class BusyVictim(Victim):
    """A victim that fails to answer the first question."""

    def __init__(self) -> None:
        self.num_questions = 0

    async def is_banned(self, peer_id: str) -> bool:
        self.num_questions += 1
        if self.num_questions == 1:
            raise FtisError("the node does not answer")
        return True


def test_a_stream_that_is_not_opened_any_more_is_as_good_as_one_that_is_cut() -> None:
    member, victim = MemberWithoutStreams(), Victim(RunningNode(None, Path(), Path()))  # type: ignore[arg-type]
    asyncio.run(hold_streams(Attack(member, victim, random.Random(0), lambda _: None)))
    assert member.num_refused == NUM_STREAMS + 1


def test_a_victim_that_is_too_busy_to_answer_is_asked_again() -> None:
    identity, victim, maker = Identity.generate(), BusyVictim(), cast("GroupMaker", None)
    gossip: Any = LoopbackSwarm().join(identity.peer_id, run_id="ab" * 16, num_shards=1)
    member = Member(gossip, identity, maker, victim, "it")
    asyncio.run(member.announce_until_requested({b"id": b"claim"}, within_s=30.0))
    assert victim.num_questions == 2


def ended_process() -> psutil.Process:
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as started_process:
        return psutil.Process(started_process.pid)


class NodeWithProcesses(SwarmNode):
    """A running node whose p2pd is another process at each look."""

    is_running = True

    def __init__(self, home: Path, *found: psutil.Process) -> None:
        line: Any = None
        super().__init__("a", home, ("join",), line)
        self.found = list(found)

    def roles(self) -> dict[str, list[psutil.Process]]:
        return {"p2pd": [self.found.pop(0)]}


def test_a_process_that_ends_while_all_are_killed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers end with their daemon, which is killed first."""
    gone = ended_process()
    monkeypatch.setattr(RunningNode, "processes", lambda node: [gone, psutil.Process(node.process.pid)])
    with started(tmp_path / "home", "join", on=(sys.executable, "-c", "import time; time.sleep(60)")) as node:
        pass
    assert node.process.returncode == -9


def test_a_worker_that_ends_before_it_is_killed_is_replaced_all_the_same(tmp_path: Path) -> None:
    gone = ended_process()
    node = NodeWithProcesses(tmp_path, gone, psutil.Process())
    scene = Scene(Swarm(tmp_path, {}), node, random.Random(0))
    process_faults.kill(scene, role="p2pd")
    assert scene.notes == [f"pid {gone.pid}"]
    assert not node.found
