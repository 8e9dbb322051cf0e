"""Experiment trackers for a node's metrics: TensorBoard, Weights & Biases, trackio.

Each library is optional and imported only when its tracker is opened. The record writer of the `tensorboard` package
writes TensorBoard's files. Torch's writer would import torch into the daemon, and the higher-level writers of
`tensorboard` have a thread that hides a full disk. Calls may block and raise any exception: see `tracking.py`.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass, field
from importlib import util
from typing import TYPE_CHECKING, Any, Protocol

from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """An open tracker. `log` writes the metrics of one step; curves continue those of the node's earlier processes."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows. `id` is the same after each restart; trackers may store files in `folder`."""

    project: str
    name: str
    id: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


class TensorBoardTracker:
    """TensorBoard: one event file in `<folder>/tensorboard` per start, which TensorBoard joins to one curve."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder = run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names, so the name begins with the time.
        now_s = time.time()
        name = f"events.out.tfevents.{int(now_s):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._records = RecordWriter((folder / name).open("xb"))
        self._records.write(self._event(wall_time=now_s, file_version="brain.Event:2").SerializeToString())

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


class WandbTracker:
    """Weights & Biases. Without an API key the run stays on disk, because a daemon cannot prompt for a login."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        can_log_in = wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.settings),
            mode=None if can_log_in else "offline",
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        # Steps on a separate axis: W&B's counter starts again at 0 in an offline run and refuses to go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if can_log_in:
            log.info("wandb: figures go to %s", self._run.url or self._run.dir)
        else:
            log.info("wandb: no key is configured, so figures stay in %s; `wandb sync` uploads them", run.folder)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """trackio, in its default folder or the one in its environment variables."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # trackio resumes a run by its name.
        name = f"{run.name}-{run.id}"
        self._run = trackio.init(run.project, name=name, resume="allow", config=dict(run.settings), embed=False)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError for the first tracker whose package, of the same name, is not installed."""
    for name in names:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a folder with that name; `wandb` creates one where it runs
            raise ConfigError(
                f"the tracker {name!r} is not installed: pip install {name}, or remove it from tracking.to"
            )
