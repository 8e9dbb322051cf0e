"""Metrics to experiment trackers: TensorBoard, Weights & Biases, trackio. A tracker never stops the node.

Each tracker has a thread and a bounded queue, because its calls may block and raise any exception. Metrics that do not
fit into the queue are dropped and counted. Errors of a tracker are counted; the first is logged. After an error the
tracker is opened again for the next metrics, with a new file or connection.

Each library is optional and imported only when its tracker is opened. The record writer of the `tensorboard` package
writes TensorBoard's files. Torch's writer would import torch into the daemon, and the higher-level writers of
`tensorboard` have a thread that hides a full disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any, TypeAlias

from ftis_node.errors import ConfigError

PROJECT = "ftis-node"  # of wandb and trackio
DEFAULT_CAPACITY = 1024
DEFAULT_CLOSE_LIMIT_S = 5.0
log = logging.getLogger(__name__)


LogFigures: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Writes the figures of one step."""

OpenTracker: TypeAlias = Callable[[], AbstractContextManager[LogFigures]]
"""Opens a tracker. Its curves continue those of the node's earlier processes."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows. `id` is the same after each restart; trackers may store files in `folder`."""

    name: str
    id: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def open_tensorboard(run: TrackedRun) -> Iterator[LogFigures]:
    """TensorBoard: one event file in `<folder>/tensorboard` per start, which TensorBoard joins to one curve."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder = run.folder / "tensorboard"
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files of a folder in the order of their names, so the name begins with the time.
    now_s = time.time()
    name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
    with closing(RecordWriter((folder / name).open("xb"))) as records:
        records.write(event_pb2.Event(wall_time=now_s, file_version="brain.Event:2").SerializeToString())

        def log_figures(step: int, figures: Mapping[str, float]) -> None:
            values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
            event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values))
            records.write(event.SerializeToString())
            records.flush()

        yield log_figures


@contextmanager
def open_wandb(run: TrackedRun) -> Iterator[LogFigures]:
    """Weights & Biases. Without an API key the run stays on disk, because a daemon cannot prompt for a login."""
    import wandb

    can_log_in = wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False)
    opened = wandb.init(
        project=PROJECT,
        name=run.name,
        id=run.id,
        resume="allow",
        dir=run.folder,
        config=dict(run.settings),
        mode=None if can_log_in else "offline",
        settings=wandb.Settings(console="off", silent=True, disable_git=True),
    )
    # Steps on a separate axis: W&B's counter starts again at 0 in an offline run and refuses to go back.
    opened.define_metric("step")
    opened.define_metric("*", step_metric="step")
    if can_log_in:
        log.info("wandb: figures go to %s", opened.url or opened.dir)
    else:
        log.info("wandb: no key is configured, so figures stay in %s; `wandb sync` uploads them", run.folder)
    try:
        yield lambda step, figures: opened.log({"step": step, **figures})
    finally:
        opened.finish()


@contextmanager
def open_trackio(run: TrackedRun) -> Iterator[LogFigures]:
    """trackio, in its default folder or the one in its environment variables. It resumes a run by its name."""
    import trackio

    name = f"{run.name}-{run.id}"
    opened = trackio.init(PROJECT, name=name, resume="allow", config=dict(run.settings), embed=False)
    try:
        yield lambda step, figures: opened.log(dict(figures), step=step)
    finally:
        opened.finish()


TRACKERS = {"tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio}


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError for the first tracker whose package, of the same name, is not installed."""
    for name in names:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a folder with that name; `wandb` creates one where it runs
            raise ConfigError(
                f"the tracker {name!r} is not installed: pip install {name}, or remove it from tracking.to"
            )


class TrackerThread:
    """Thread that owns one tracker: opens it, writes to it, closes it. The event loop calls `offer` and `end`."""

    def __init__(self, name: str, open_tracker: OpenTracker, *, capacity: int = DEFAULT_CAPACITY) -> None:
        self.name = name
        self.num_written = self.num_failed = self.num_dropped = 0
        self._open_tracker = open_tracker
        self._has_warned = False
        self._capacity = capacity
        self._entries: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._log_figures: LogFigures | None = None  # of the open tracker
        self._opened = ExitStack()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def offer(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue metrics without waiting; drop them if the queue is full."""
        if self._entries.qsize() < self._capacity:
            self._entries.put((step, figures))
            return
        if not self.num_dropped:
            log.warning("%s is too slow: its curves lack some values (logged once)", self.name)
        self.num_dropped += 1

    def end(self) -> None:
        """Make the thread write all queued metrics and close the tracker; does not wait."""
        self._entries.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the thread; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._attempt(None)  # open now, so that a fault is logged at the start and not at the first step
        while (entry := self._entries.get()) is not None:
            if self._attempt(entry):
                self.num_written += 1
            else:
                self.num_failed += 1
        self._close()

    def _attempt(self, entry: tuple[int, Mapping[str, float]] | None) -> bool:
        """Open the tracker if it is closed, and write the entry. Return whether both succeeded."""
        try:
            if self._log_figures is None:
                self._log_figures = self._opened.enter_context(self._open_tracker())
            if entry is not None:
                self._log_figures(*entry)
        except Exception as error:
            self._warn_once("takes no figures", error)
            self._close()
            return False
        return True

    def _close(self) -> None:
        self._log_figures = None
        try:
            self._opened.close()
        except Exception as error:
            self._warn_once("could not be closed", error)

    def _warn_once(self, problem: str, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            what = f"{problem} ({type(error).__name__}: {error})"
            log.warning("%s %s; training continues, and its further faults are not logged", self.name, what)


class Tracking:
    """All trackers of a node, possibly none."""

    def __init__(self, threads: Iterable[TrackerThread] = ()) -> None:
        self._threads = tuple(threads)

    @classmethod
    def to(cls, names: Iterable[str], run: TrackedRun) -> Tracking:
        """Start one thread for each tracker in `names`."""
        return cls(TrackerThread(name, partial(TRACKERS[name], run)) for name in names)

    def __bool__(self) -> bool:
        return bool(self._threads)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for thread in self._threads:
            thread.offer(step, figures)

    async def close(self, *, limit_s: float = DEFAULT_CLOSE_LIMIT_S) -> None:
        """Write all queued metrics and close the trackers. Stop waiting for slow trackers after `limit_s` seconds."""
        for thread in self._threads:
            thread.end()
        await asyncio.to_thread(self._join, limit_s)

    def _join(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            if not thread.join(max(0.0, deadline - time.monotonic())):
                log.warning("%s did not end within %g s; its newest figures may be lost", thread.name, limit_s)

    def counts(self) -> dict[str, dict[str, int]]:
        return {
            thread.name: {"written": thread.num_written, "failed": thread.num_failed, "dropped": thread.num_dropped}
            for thread in self._threads
        }


def numbers_of(fields: Mapping[str, Any], *, prefix: str) -> dict[str, float]:
    """Return every number in a record by its path (`learner/loss`), including those in nested dicts; no booleans."""
    found: dict[str, float] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= numbers_of(value, prefix=f"{prefix}/{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}/{name}"] = float(value)
    return found
