"""A node's home: the one folder that holds everything it must not lose.

    identity.key   the private key, 0600
    node.toml      settings of this node
    run.toml       the manifest of the run this home belongs to
    settings.json  the settings of the last start, all sources together
    replay.sqlite  groups, own and foreign, and their states
    checkpoints/   weights, optimiser and random state
    weights/       versions handed to the generator
    events.jsonl   one line for each thing that happened
    tensorboard/, wandb/   what those trackers write, where `tracking.to` names them
    status.json    the last status, for when the node is stopped
    logs/          what the workers print
    lock           held while a node runs, with its pid

Sockets live in a folder of their own beside the home's other run-time files, short enough for the 107 characters that a
unix socket's path may have.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from ftis_node.errors import ConfigError, HomeInUseError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_TRIES = 3
LOCK_PAUSE_S = 0.05
MAX_SOCKETS_PATH = 70  # leaves room for the sockets' own names


def default_home() -> Path:
    """The platform's data folder for ftis-node."""
    return Path(platformdirs.user_data_dir("ftis-node"))


@dataclass(frozen=True, slots=True)
class Home:
    """Paths inside a node's home; nothing is read or written by making one."""

    root: Path

    @property
    def identity(self) -> Path:
        """The private key."""
        return self.root / "identity.key"

    @property
    def node_toml(self) -> Path:
        """Settings of this node."""
        return self.root / "node.toml"

    @property
    def run_toml(self) -> Path:
        """The manifest of the run that this home belongs to."""
        return self.root / "run.toml"

    @property
    def settings(self) -> Path:
        """The settings of the last start, all sources together."""
        return self.root / "settings.json"

    @property
    def replay(self) -> Path:
        """The replay buffer."""
        return self.root / "replay.sqlite"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one folder a step."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Weights handed to the generator, one folder a version."""
        return self.root / "weights"

    @property
    def events(self) -> Path:
        """The event trail, JSON lines."""
        return self.root / "events.jsonl"

    @property
    def status(self) -> Path:
        """The last status snapshot."""
        return self.root / "status.json"

    @property
    def logs(self) -> Path:
        """Output of the processes."""
        return self.root / "logs"

    @property
    def lock(self) -> Path:
        """The lock file; holds the running node's pid and the address of its status port."""
        return self.root / "lock"

    @property
    def sockets(self) -> Path:
        """Folder of unix sockets: inside the home, or where its path is too long a private one in the temp folder."""
        inside = self.root.absolute() / "run"
        if len(str(inside)) <= MAX_SOCKETS_PATH:
            return inside
        digest = hashlib.sha256(str(inside).encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"ftis-{os.getuid()}-{digest}"

    def create(self) -> None:
        """Makes the folders. Raises ConfigError where that is not possible."""
        try:
            for folder in (self.root, self.checkpoints, self.weights, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.sockets, ignore_errors=True)
            self.sockets.mkdir(mode=0o700)
        except OSError as error:
            raise self._unusable(error) from None

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Holds the home's lock. Raises HomeInUseError where another node holds it.

        The lock is the kernel's: it goes with the process, however that ends.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._take_lock(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            self.create()
            yield
            shutil.rmtree(self.sockets, ignore_errors=True)
        finally:
            os.close(descriptor)

    def _take_lock(self, descriptor: int) -> None:
        """Locks for this process; a reader that looks at the same moment is waited for."""
        for attempt in range(LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_S * (attempt + 1))
            else:
                return
        owner = self.lock.read_text().split("\n", 1)[0] or "unknown"
        raise HomeInUseError(f"{self.root} is in use by a running node (pid {owner}): stop it, or give another --home")

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot use {self.root} as home: {error.strerror}; give another with --home")

    def publish_address(self, url: str) -> None:
        """Writes the status port's URL into the lock file, for `status` and its like."""
        self.lock.write_text(f"{os.getpid()}\n{url}\n")

    def running_url(self) -> str | None:
        """The status URL of the node that runs on this home, None where none does."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            lines = self.lock.read_text().split("\n")
            return lines[1] if len(lines) > 1 and lines[1] else None
        finally:
            os.close(descriptor)
        return None
