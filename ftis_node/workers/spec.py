"""Two records from a worker's owner: the process to spawn, and its time limits.

The path of a worker's socket: a file in a folder that the caller gives.

The kernel limits the path of a unix socket to 107 bytes. For a longer one zmq's error does not name the folder, so this
module checks the length.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.errors import ConfigError
from ftis_node.workers.liveness import Liveness

if TYPE_CHECKING:
    from ftis_node.workers.preload import PreloadingProcess
    from ftis_node.workers.wire import Message

SCHEME = "ipc://"
MAX_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes, including the terminating zero


def endpoint_in(sockets_dir: Path, *, name: str) -> str:
    """Return a zmq endpoint in `sockets_dir`, and create that folder if missing. Raises ConfigError for a path that is
    too long.
    """
    path = Path(sockets_dir).absolute() / f"{name}.sock"
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} is {num_bytes} bytes long, the system's limit is {MAX_SOCKET_PATH_BYTES}: "
            "choose a home with a shorter path"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return f"{SCHEME}{path}"


def remove_socket(endpoint: str) -> None:
    """Remove an endpoint's socket file, which zmq does not remove."""
    Path(endpoint.removeprefix(SCHEME)).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The process to spawn: `python -m module`. `boot` is the first message that it receives.

    `environment` is added to the daemon's environment. `launcher` precedes the module's name on the command line
    (torchrun, for example). The first process is forked from `preloading` if that is possible.
    """

    name: str
    module: str
    boot: Message
    sockets_dir: Path
    log_path: Path
    event_types: tuple[type[Message], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = (sys.executable, "-m")
    preloading: PreloadingProcess | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds. With `stall_timeout_s` None a request may take any time."""

    start_grace_s: float = 900.0
    heartbeat_every_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    stall_timeout_s: float | None = None
    stop_grace_s: float = 4.0
    terminate_grace_s: float = 1.0

    def liveness(self) -> Liveness:
        """Return a failure detector for one worker process."""
        stall_timeout_s = self.stall_timeout_s
        return Liveness(
            max_silent_ticks=max(1, round(self.heartbeat_timeout_s / self.heartbeat_every_s)),
            max_stalled_ticks=None
            if stall_timeout_s is None
            else max(1, round(stall_timeout_s / self.heartbeat_every_s)),
        )
