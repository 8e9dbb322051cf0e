"""Faults on a busy machine: what is late or ends too early for them is no violation."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil

from ftis_node.errors import FtisError
from ftis_node.gossip.p2pd.client import P2pdError
from tests.attacks.member import Member
from tests.chaos import process_faults
from tests.chaos.hostile_faults import NUM_STREAMS, Attack, hold_streams
from tests.node.support import RunningNode, started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest


def test_a_stream_that_is_not_opened_any_more_is_as_good_as_one_that_is_cut() -> None:
    asked: list[float] = []

    @asynccontextmanager
    async def stream(service: Any) -> AsyncIterator[Any]:
        asked.append(service)
        raise P2pdError("failed to open stream: context deadline exceeded")
        yield

    member: Any = SimpleNamespace(stream=stream)
    victim: Any = SimpleNamespace()
    asyncio.run(hold_streams(Attack(member, victim, random.Random(0), lambda _: None)))
    assert len(asked) == NUM_STREAMS + 1


def test_a_victim_that_is_too_busy_to_answer_is_asked_again() -> None:
    answers = iter((FtisError("the node does not answer"), True))

    async def is_banned(peer_id: str) -> bool:
        answer = next(answers)
        if isinstance(answer, FtisError):
            raise answer
        return answer

    async def announce(claim: bytes) -> bool:
        return True

    gossip: Any = SimpleNamespace(serve=lambda *_, **__: None, announce=announce)
    others: Any = SimpleNamespace(is_banned=is_banned, peer_id="me")
    member = Member(gossip, others, others, others, "it")
    asyncio.run(member.announce_until_asked({b"id": b"claim"}, within_s=30.0))
    assert next(answers, None) is None


def test_a_process_that_ends_while_all_are_killed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers end with their daemon, which is killed first."""

    def ended() -> None:
        raise psutil.NoSuchProcess(1)

    gone = SimpleNamespace(is_running=lambda: True, kill=ended)
    monkeypatch.setattr(RunningNode, "processes", lambda node: [gone, psutil.Process(node.process.pid)])
    with started(tmp_path / "home", "join", on=(sys.executable, "-c", "import time; time.sleep(60)")) as node:
        pass
    assert node.process.returncode == -9


def test_a_worker_that_ends_before_it_is_killed_is_replaced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended() -> None:
        raise psutil.NoSuchProcess(1)

    node = SimpleNamespace(roles=lambda: {"p2pd": [SimpleNamespace(pid=2)]}, wait_for=lambda holds, timeout_s: holds())
    monkeypatch.setattr(process_faults, "_process", lambda scene, role: SimpleNamespace(pid=1, kill=ended))
    scene: Any = SimpleNamespace(node=node, note=lambda what: None)
    process_faults.kill(scene, role="p2pd")
