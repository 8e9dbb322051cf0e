"""A full home: the order of removal, the pause and its end. Also the limits of open files, priority and memory."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError
from ftis_node.node.loops import disk_cleanup
from ftis_node.node.loops.disk_cleanup import DiskCleanupLoop
from ftis_node.node.storage import home_size
from ftis_node.node.storage.disk_space import HomeLimit, HomeUse, measure_usage
from ftis_node.node.supervision.process_limits import MIN_OPEN_FILES, open_files
from ftis_node.node.wiring import NodeComponents
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.telemetry.events import event_log_files, read_events
from tests.node.nodes import components
from tests.replay.test_buffer import ANN, ME, accepted

ROOT = Path(__file__).parents[3]
KB = 1000
ANYTHING: Any = None


def test_a_nearly_full_and_a_full_home():
    limit = HomeLimit(1600, reserve_bytes=300)  # a margin of 100
    assert limit.missing_bytes(HomeUse(1200, free_bytes=10_000)) == 0
    assert limit.missing_bytes(HomeUse(1250, free_bytes=10_000)) == 50, "the margin is not part of the missing bytes"
    assert limit.why_full(HomeUse(1300, free_bytes=10_000), was_full=False) == "", "a nearly full node paused"
    assert "the home is full: 1.3 kB of 1.6 kB" in limit.why_full(HomeUse(1301, free_bytes=10_000), was_full=False)
    assert limit.why_full(HomeUse(1260, free_bytes=10_000), was_full=True), "resumed for one byte"
    assert limit.why_full(HomeUse(1250, free_bytes=10_000), was_full=True) == ""
    assert "the disk is full: 299 B are free" in limit.why_full(HomeUse(0, free_bytes=299), was_full=False)
    assert limit.missing_bytes(HomeUse(0, free_bytes=299)) == 101


def test_files_being_written_or_removed_count_in_the_reserve(tmp_path):
    home = Home(tmp_path)
    home.create()
    for name in ("step-00000001", "step-00000002", "step-00000003", ".step-00000004.incomplete-ab"):
        (home.checkpoints / name).mkdir()
        (home.checkpoints / name / "weights").write_bytes(bytes(1000))
    (home.logs / "learner.log").write_bytes(bytes(10))
    assert measure_usage(home).used_bytes == 2010


class FullHome:
    """A node with used and READY groups, old logs and events, and two checkpoints."""

    def __init__(self, node: NodeComponents) -> None:
        self.home, self.buffer, self.space = node.home, node.store.buffer, node.store.space
        self.loop = DiskCleanupLoop(node.store)
        for number in range(1, 201):
            assert self.buffer.admit(accepted(ME, number), own=True)
        assert self.buffer.admit(accepted(ANN, 1), own=False)
        self.buffer.take(2, own=200, foreign=0)
        self.buffer.release_step(2, ReleaseReason.TRAINED)
        node.context.events._max_bytes = 30 * KB
        while len(event_log_files(self.home.events)) < 3:
            node.context.events.write("filler", text="x" * 1000)
        for step in (2, 3):
            folder = self.home.checkpoints / f"step-{step:08}"
            folder.mkdir()
            (folder / "weights").write_bytes(bytes(50 * KB))
            (folder / "COMPLETE").touch()
        (self.home.logs / "learner.log.1").write_bytes(bytes(40 * KB))
        (self.home.logs / "learner.log").write_bytes(bytes(25 * KB))

    @property
    def used_bytes(self) -> int:
        return measure_usage(self.home).used_bytes

    async def check(self, limit_bytes: int) -> list[str]:
        """Check the home once with this limit and no reserve; return what was removed."""
        self.space.limit = HomeLimit(limit_bytes, reserve_bytes=0)
        num_before = len(read_events(self.home.events, name="disk_reclaimed"))
        await self.loop.check()
        return [event["what"] for event in read_events(self.home.events, name="disk_reclaimed")[num_before:]]


@pytest.fixture
def full(tmp_path):
    with components(tmp_path) as node:
        yield FullHome(node)


async def test_the_least_needed_files_are_removed_first_and_no_more_than_needed(full):
    assert await full.check(2 * full.used_bytes) == []
    assert await full.check(full.used_bytes) == ["free pages"], "truncating the journal was not enough"
    used = full.used_bytes
    assert await full.check(used) == ["used groups"], "not only the margin was removed"
    assert full.used_bytes <= used - used // 16
    assert 0 < full.buffer._db.execute("SELECT count(*) FROM groups WHERE state = 'released'").fetchone()[0] < 200
    await full.check(full.used_bytes - 30 * KB)
    removed = await full.check(full.used_bytes - 10 * KB)
    assert removed[-1:] == ["old events"] and len(event_log_files(full.home.events)) < 3
    assert not (full.home.logs / "learner.log.1").exists()
    assert (full.home.logs / "learner.log").stat().st_size == 25 * KB
    assert len(list(full.home.checkpoints.iterdir())) == 2, "checkpoints were removed before events"
    assert (await full.check(1 << 10))[-1] == "old checkpoints"
    assert [path.name for path in full.home.checkpoints.iterdir()] == ["step-00000003"]
    assert full.buffer.take(4, own=9, foreign=9).groups[0].sender == ANN.peer_id, "a READY group was removed"
    assert "the home is full" in full.space.why_full


async def test_the_node_pauses_and_resumes_with_one_event_each(full):
    await full.check(1 << 30)
    space, loop = full.space, full.loop
    (full.home.root / "backups").mkdir()
    ballast = full.home.root / "backups" / "not-ours.bin"
    ballast.write_bytes(bytes(1000 * KB))
    space.limit = HomeLimit(900 * KB, reserve_bytes=KB)
    await loop.check()
    await loop.check()
    assert "the home is full" in space.why_full
    assert not space._has_space.is_set()
    ballast.unlink()
    await loop.check()
    assert space.why_full == ""
    await space.wait_available()
    names = [event["event"] for event in read_events(full.home.events) if event["event"] in ("paused", "resumed")]
    assert names == ["paused", "resumed"]


async def test_a_lack_of_file_descriptors_skips_one_cleanup(full, monkeypatch):
    monkeypatch.setattr(disk_cleanup, "DISK_PERIOD_S", 0.01)
    outcomes = iter([OSError(errno.EMFILE, "Too many open files"), None, OSError(errno.EIO, "broken disk")])

    async def check():
        if (outcome := next(outcomes)) is not None:
            raise outcome

    monkeypatch.setattr(full.loop, "check", check)
    with pytest.raises(OSError, match="broken disk"):
        await full.loop.run()
    assert full.loop._shortage.count == 1


def test_a_limit_that_cannot_be_kept_is_refused(monkeypatch):
    monkeypatch.setattr(home_size, "checkpoint_bytes", lambda source, settings: 100_000_000)
    monkeypatch.setattr(home_size, "version_bytes", lambda settings, source: 0)
    with pytest.raises(ConfigError, match=r"home_bytes is 200 MB, and .* at least 2\d\d MB"):
        home_size.limit_of(NodeSettings(model="m", limits={"home_bytes": 200_000_000}), ANYTHING)
    assert home_size.limit_of(NodeSettings(model="m", limits={"home_bytes": 300_000_000}), ANYTHING)
    unset = NodeSettings(model="m")
    usual = home_size.limit_of(unset, ANYTHING).limit_bytes
    buffer_bytes = unset.buffer.max_disk_bytes
    assert usual == home_size.usual_home_bytes(unset, checkpoint_bytes=10**8, weights_bytes=0)
    assert usual > buffer_bytes + 3 * 10**8


def run_limited(code: str, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process with these limits of open files."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


def test_the_limit_of_open_files_is_raised_and_too_low_a_limit_is_refused():
    code = "from ftis_node.node.supervision.process_limits import *; allow_open_files(); print(*open_files())"
    assert run_limited(code, 256, 4096).stdout.split() == ["4096", "4096"]
    done = run_limited(code, 100, MIN_OPEN_FILES - 1)
    assert done.returncode != 0 and "LimitNOFILE" in done.stderr
    assert open_files().reachable >= MIN_OPEN_FILES


def test_priority_and_threads_follow_the_settings_and_reach_child_processes():
    code = """
import os, subprocess, sys
from ftis_node.config.limits import LimitsSection
from ftis_node.node.supervision.process_limits import apply_limits
os.environ["OMP_NUM_THREADS"] = "3"
os.environ.pop("GOMAXPROCS", None)
apply_limits(LimitsSection(nice=7))
apply_limits(LimitsSection())
child = "import os; print(os.getpriority(os.PRIO_PROCESS, 0), os.environ['GOMAXPROCS'], os.environ['OMP_NUM_THREADS'])"
subprocess.run([sys.executable, "-c", child], check=True)
"""
    nice = max(7, os.getpriority(os.PRIO_PROCESS, 0))  # a process cannot lower it
    assert run_limited(code, 1024, 1024).stdout.split() == [str(nice), str(max(2, (os.cpu_count() or 2) // 4)), "3"]
