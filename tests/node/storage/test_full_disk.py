"""A disk that fills suddenly: each write waits for space, the node pauses, and nothing acknowledged is lost."""

import asyncio
import errno
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftis_node.errors import DiskFullError
from ftis_node.learner.messages import StepReport, TrainReply
from ftis_node.node.loops import disk_cleanup as module
from ftis_node.node.loops.disk_cleanup import rotate_log
from ftis_node.node.storage.disk_space import DiskSpace
from ftis_node.node.storage.node_store import DiskThread
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import NullLearner
from ftis_node.replay.lifecycle import ReleaseReason
from tests.node.loops.test_train import HONEST, foreign
from tests.node.nodes import buffer_of, components
from tests.replay.test_buffer import ANN, accepted
from tests.waiting import eventually


@contextmanager
def full(database: sqlite3.Connection) -> Iterator[None]:
    """Let SQLite find no space for another page, as on a full disk."""
    (most,) = database.execute("PRAGMA max_page_count").fetchone()
    (used,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {used}")
    try:
        yield
    finally:
        database.execute(f"PRAGMA max_page_count = {most}")


@contextmanager
def node_with_space(folder: Path, **changes: Any) -> Iterator[NodeComponents]:
    """Yield a node whose disk thread repeats refused writes."""
    space = DiskSpace(root=folder)
    disk = DiskThread(space)
    with components(folder, space=space, disk=disk, **changes) as node:
        yield node
    disk.close()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_commit_waits_for_space_and_loses_no_group(tmp_path, stops):
    """A stop meanwhile acknowledges nothing, and is not delayed by the full disk."""
    with node_with_space(tmp_path) as node:
        intake = Wiring(node).intake
        groups = [accepted(ANN, number, created_at=time.time()) for number in range(1, 40)]
        running = asyncio.create_task(intake.run())
        arrivals = [_arrival(group) for group in groups]
        with full(node.store.buffer._db):
            for arrival, group in zip(arrivals, groups, strict=True):
                intake._judged.put_nowait((arrival, group))
            await eventually(lambda: node.store.space.why_full)
            assert not [arrival for arrival in arrivals if arrival.verdict.done()], "acknowledged before it was stored"
            if stops:
                await node.store.space.end()
                running.cancel()
                await asyncio.wait({running}, timeout=30)
                assert running.cancelled()
                return
        await asyncio.gather(*(arrival.verdict for arrival in arrivals))
        running.cancel()
        await asyncio.wait({running})
        assert node.store.reader.figures().groups_foreign == len(groups)
        assert not node.store.space.why_full


def _arrival(group: Any) -> Any:
    from ftis_node.node.loops.intake import Arrival

    return Arrival(group.envelope_bytes, ANN.peer_id, None, None, asyncio.get_running_loop().create_future())


class Learner(NullLearner):
    """A learner whose disk refuses the weights of a step twice."""

    num_refused = 0

    async def train(self, groups: Any, **how: Any) -> TrainReply:
        if self.num_refused < 2:
            self.num_refused += 1
            raise DiskFullError("weights 1 cannot be written: [Errno 28] No space left on device; free disk space")
        report = StepReport(step=1, policy_version=1, num_updates=1, repeated=True, foreign_groups=1)
        return TrainReply(report=report)


async def test_a_step_whose_weights_find_no_space_is_completed_later(tmp_path, monkeypatch):
    with node_with_space(tmp_path, learner=Learner(1)) as node:
        wiring = Wiring(node)
        loop = wiring.train_loop(wiring.step_gate(), last_step=None)
        training = asyncio.create_task(loop._train([foreign(HONEST, 1)]))
        await eventually(lambda: node.store.space.why_full)
        assert node.store.space.why_full == "weights 1 cannot be written: [Errno 28] No space left on device"
        await training
        assert node.context.state.step == 1 and not node.store.space.why_full
        assert node.context.counters.groups_trained_foreign == 1, "the step counts as a repeated one"
        assert buffer_of(node).released == [(1, ReleaseReason.TRAINED)]


WRITER = (
    "import sys\nfor line in sys.stdin: print(line.strip() * 100, flush=True); print('.', file=sys.stderr, flush=True)"
)


def test_after_a_rotation_the_process_writes_at_the_start_of_the_file(tmp_path):
    path = tmp_path / "learner.log"
    with (
        path.open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.PIPE, text=True
        ) as writer,
    ):
        for letter in "abc":
            writer.stdin.write(f"{letter}\n")
            writer.stdin.flush()
            writer.stderr.readline()
            for _ in range(2):
                rotate_log(path, max_bytes=100)
        writer.stdin.write("d\n")
        writer.stdin.close()
    assert path.read_text() == "d" * 100 + "\n", "the file has a hole at its start"
    assert (tmp_path / "learner.log.1").read_text() == "c" * 100 + "\n", "the older file is not the last rotated one"
    assert len(list(tmp_path.iterdir())) == 2


def test_on_a_full_disk_the_log_is_emptied_without_a_copy(tmp_path, monkeypatch):
    def fail_on_a_full_disk(source, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfile", fail_on_a_full_disk)
    path = tmp_path / "learner.log"
    path.write_bytes(bytes(100))
    rotate_log(path, max_bytes=100)
    assert (path.stat().st_size, list(tmp_path.iterdir())) == (0, [path])
