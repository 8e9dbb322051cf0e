"""Trackers write complete curves over several starts; a failing, slow or missing tracker does not stop the node."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import ftis_node
from ftis_node.errors import ConfigError
from ftis_node.telemetry.tracking import LogFigures, TrackedRun, TrackerThread, Tracking, check_installed, numbers_of
from tests.waiting import wait_until

LIMIT_S = 20.0


def run_in(folder: Path) -> TrackedRun:
    return TrackedRun(name="n1", id="ab-cd", folder=folder, settings={"run": {"name": "test"}})


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return steps and values as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(entry.step, entry.value) for entry in events.Scalars(name)]


async def test_tensorboard_joins_two_starts_into_one_curve(tmp_path):
    for steps in ((1, 2), (3,)):
        tracking = Tracking.to(["tensorboard"], run_in(tmp_path))
        for step in steps:
            tracking.log(step, {"learner/loss": -0.5 * step, "eval/gsm8k/pass_at_1": 0.25})
        await tracking.close(limit_s=LIMIT_S)
        assert tracking.counts() == {"tensorboard": {"written": len(steps), "failed": 0, "dropped": 0}}
    assert curve(tmp_path, "learner/loss") == [(1, -0.5), (2, -1.0), (3, -1.5)]
    assert curve(tmp_path, "eval/gsm8k/pass_at_1") == [(1, 0.25), (2, 0.25), (3, 0.25)]


async def test_a_fault_is_logged_once_and_the_tracker_recovers(tmp_path, caplog):
    blocking_file = tmp_path / "tensorboard"
    blocking_file.write_text("not a folder")
    tracking = Tracking.to(["tensorboard"], run_in(tmp_path))
    for step in (1, 2):
        tracking.log(step, {"loss": 1.0})
    wait_until(lambda: tracking.counts()["tensorboard"]["failed"] == 2)
    blocking_file.unlink()
    tracking.log(3, {"loss": 1.5})
    await tracking.close(limit_s=LIMIT_S)
    assert tracking.counts() == {"tensorboard": {"written": 1, "failed": 2, "dropped": 0}}
    assert curve(tmp_path, "loss") == [(3, 1.5)]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("tensorboard takes no figures (FileExistsError: ")


class StuckTracker:
    """A tracker whose server does not answer."""

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.is_busy = threading.Event()
        self.may_continue = threading.Event()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.is_busy.set()
        assert self.may_continue.wait(LIMIT_S)
        self.logged.append(step)

    @contextmanager
    def opened(self) -> Iterator[LogFigures]:
        yield self.log
        self.logged.append(-1)


async def test_a_tracker_that_does_not_answer_delays_no_step(caplog):
    stuck = StuckTracker()
    thread = TrackerThread("slow", stuck.opened, capacity=2)
    tracking = Tracking([thread])
    tracking.log(1, {})
    assert stuck.is_busy.wait(LIMIT_S)
    for step in (2, 3, 4, 5):
        tracking.log(step, {})
    assert thread.num_dropped == 2
    await tracking.close(limit_s=0.1)
    assert [record.getMessage().split(" ")[:3] for record in caplog.records] == [
        ["slow", "is", "too"],
        ["slow", "did", "not"],
    ]
    stuck.may_continue.set()
    assert thread.join(LIMIT_S)
    assert stuck.logged == [1, 2, 3, -1]
    assert tracking.counts() == {"slow": {"written": 3, "failed": 0, "dropped": 2}}


def test_a_full_disk_is_logged_once(tmp_path):
    """A limit of the file size simulates a full disk: writing fails, and so does closing with unwritten data."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=50
    )
    assert json.loads(done.stdout) == {"tensorboard": {"written": 2, "failed": 3, "dropped": 0}}
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "File too large" in done.stderr
    assert [step for step, _ in curve(tmp_path, "loss")] == [1, 5]


FULL_DISK = """
import asyncio, json, resource, sys
from pathlib import Path
from ftis_node.telemetry.tracking import TrackedRun, Tracking

async def main(folder):
    tracking = Tracking.to(["tensorboard"], TrackedRun(name="n", id="i", folder=Path(folder)))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 6):
        tracking.log(step, {"loss": 0.0})
        while sum(tracking.counts()["tensorboard"].values()) < step:
            await asyncio.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 if step in (1, 2, 3) else most, most))
    await tracking.close()
    print(json.dumps(tracking.counts()))

asyncio.run(main(sys.argv[1]))
"""


def test_a_tracker_that_is_not_installed_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    check_installed(["tensorboard"])
    for make_folder in (False, True):
        if make_folder:
            (tmp_path / "ftis_absent").mkdir()  # a folder without a package, as wandb creates one
        with pytest.raises(ConfigError) as caught:
            check_installed(["tensorboard", "ftis_absent"])
        assert str(caught.value) == (
            "the tracker 'ftis_absent' is not installed: pip install ftis_absent, or remove it from tracking.to"
        )


def test_only_numeric_fields_of_a_record_are_tracked():
    fields = {"loss": -1, "mean": None, "name": "x", "repeated": True, "refused": {"reward": 2}, "ids": [1]}
    assert numbers_of(fields, prefix="learner") == {"learner/loss": -1.0, "learner/refused/reward": 2.0}


RUN_TRACKER = """
import asyncio, logging, sys
from pathlib import Path
from ftis_node.telemetry.tracking import TrackedRun, Tracking

async def main(name, folder, step):
    run = TrackedRun(name="n1", id="ab-cd", folder=Path(folder), settings={"run": {"name": "x"}})
    tracking = Tracking.to([name], run)
    tracking.log(int(step), {"learner/loss": 0.125 * int(step)})
    await tracking.close(limit_s=60.0)
    sys.exit(tracking.counts() != {name: {"written": 1, "failed": 0, "dropped": 0}})

logging.basicConfig(level=logging.INFO)
asyncio.run(main(*sys.argv[1:]))
"""


def run_tracker(name: str, folder: Path, *, step: int) -> str:
    """Run a tracker for one step in a separate process, and return its output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "TRACKIO_"))}
    paths = {"PYTHONPATH": str(Path(ftis_node.__file__).parents[1]), "TRACKIO_DIR": str(folder), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_TRACKER, name, str(folder), str(step)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=kept | paths, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(200)
def test_wandb_without_a_key_writes_both_starts_to_disk(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed: `pip install wandb`")
    for step in (1, 2):
        assert "no key is configured" in run_tracker("wandb", tmp_path, step=step)
    files = sorted(tmp_path.glob("wandb/offline-run-*-ab-cd/run-ab-cd.wandb"))
    assert len(files) == 2
    for file, value in zip(files, (b"0.125", b"0.25"), strict=True):
        assert b"learner/loss" in file.read_bytes()
        assert value in file.read_bytes()


@pytest.mark.timeout(200)
def test_trackio_continues_the_curve(tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed: `pip install trackio`")
    for step in (1, 2):
        run_tracker("trackio", tmp_path, step=step)
    with closing(sqlite3.connect(tmp_path / "ftis-node.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(name, step, json.loads(metrics)) for name, step, metrics in rows] == [
        ("n1-ab-cd", 1, {"learner/loss": 0.125}),
        ("n1-ab-cd", 2, {"learner/loss": 0.25}),
    ]
