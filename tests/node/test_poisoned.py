"""A group on which the learner fails: the worker dies or reports an error, and the node continues without the group.

Generator and network are in this process. A learner that dies is the worker of `ftis-node join`.
"""

import os
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.errors import WorkerTaskError
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessNodeFactory
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.learner.messages import TrainGroup, TrainReply
from ftis_node.node.daemon import run_node
from ftis_node.node.startup.factories import ProcessNodeFactory
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import MAX_FAILED_STEPS
from ftis_node.telemetry.events import read_events
from tests.node.nodes import whole_node
from tests.node.support import manifest_text
from tests.trained_models import trained_model

pytestmark = pytest.mark.timeout(240)

NO_TOKEN = np.array([1 << 20], dtype="<i4").tobytes()  # beyond the vocabulary of every model


class _Poisoned(InProcessNodeFactory):
    """A factory whose learner dies of, or fails on, each step with its first group, or its first foreign group.

    `kills` is the signal of its death; 0: it reports an error.
    """

    def __init__(self, home: Home, *, kills: int = 0, of_peer: bool = False) -> None:
        super().__init__(LoopbackSwarm(), delay=NO_DELAY, seed=0)
        self.poison = ""
        self.num_failed = 0
        self._home = home
        self._kills = kills
        self._of_peer = of_peer

    def learner(self, of: Any, **parts: Any) -> Any:
        makers = ProcessNodeFactory(of.settings, self._home) if self._kills else super()
        client: Any = makers.learner(of, **parts)
        train = client.train

        async def poisoned(groups: list[TrainGroup], **how: Any) -> TrainReply:
            at = next((i for i, group in enumerate(groups) if group.own is not self._of_peer), 0)
            self.poison = self.poison or groups[at].group_id
            if not any(group.group_id == self.poison for group in groups):
                return await train(groups, **how)
            self.num_failed += 1
            if self._kills:
                os.kill(client.pid, self._kills)
                return await train(groups, **how)
            spoiled = msgspec.structs.replace(groups[at], prompt_ids=NO_TOKEN)
            try:
                return await train([*groups[:at], spoiled, *groups[at + 1 :]], **how)
            except IndexError as error:  # as the worker reports it
                raise WorkerTaskError(f"learner: IndexError: {error}") from error

        client.train = poisoned
        return client


@pytest.fixture
def home(tmp_path):
    shutil.copytree(trained_model("s", scale=0.01), tmp_path / "tiny")
    home = Home(tmp_path / "home")
    home.create()
    return home


def _foreign_groups(home: Home) -> list[tuple[Accepted, bool]]:
    """Return four groups of one peer, as the intake loop stores them."""
    peer = Identity.generate()
    maker = GroupMaker(home.root.parent / "tiny", parse_manifest(manifest_text(foreign_wait_s=0.1), source="test"))
    groups = []
    for number in range(1, 5):
        group = maker.group(peer, number, num_tokens=4)
        envelope = seal_group(group, peer)
        groups.append((Accepted(envelope, envelope.to_bytes(), group, prompt_ids=(5, 6, 7)), False))
    return groups


async def _run(home: Home, makers: _Poisoned, *, steps: int, foreign: Sequence[tuple[Accepted, bool]] = ()) -> int:
    """Run the node until it ends and return its step. `foreign` groups are in its buffer from the start."""
    async with whole_node(home, home.root.parent / "tiny", makers) as parts:
        parts.store.buffer.admit_many(foreign)
        await run_node(parts, steps=steps)
        return parts.context.state.step


def _assert_released(home: Home, makers: _Poisoned) -> None:
    assert makers.num_failed == MAX_FAILED_STEPS
    released = [event["group"] for event in read_events(home.events, name="released") if event["reason"] == "poisoned"]
    assert makers.poison in released
    assert len(released) == 4, "the groups that were in each failed step: the oldest, so each step takes them"
    taken = Counter(event["group"] for event in read_events(home.events, name="taken"))
    assert all(taken[group_id] == MAX_FAILED_STEPS for group_id in released)
    assert max(taken[group_id] for group_id in taken if group_id not in released) == 1


async def test_a_group_that_kills_the_learner_is_released(home):
    makers = _Poisoned(home, kills=signal.SIGKILL)
    assert await _run(home, makers, steps=2) == 2
    _assert_released(home, makers)


async def test_a_failed_request_with_a_peers_group_does_not_end_the_node(home):
    """Only a failed step of own groups alone is the node's fault."""
    makers = _Poisoned(home, of_peer=True)
    assert await _run(home, makers, steps=2, foreign=_foreign_groups(home)) == 2
    assert makers.num_failed == MAX_FAILED_STEPS
    released = [event["group"] for event in read_events(home.events, name="released") if event["reason"] == "poisoned"]
    assert makers.poison in released
    assert _num_charged(home) == 1


def _num_charged(home: Home) -> int:
    with closing(sqlite3.connect(home.peers)) as peers:
        return int(peers.execute("SELECT count(*) FROM peers WHERE score < 0").fetchone()[0])


async def test_a_node_that_ends_at_each_failed_request_releases_the_group_at_last(home):
    makers = _Poisoned(home)
    for _ in range(MAX_FAILED_STEPS):
        with pytest.raises(ExceptionGroup) as raised:
            await _run(home, makers, steps=2)
        assert raised.group_contains(WorkerTaskError, match="index out of range")
    assert await _run(home, makers, steps=2) == 2
    _assert_released(home, makers)
