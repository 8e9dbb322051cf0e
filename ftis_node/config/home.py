"""A node's home: the folder that holds everything it must not lose (`docs/operate/data-directory.md`).

The folder's mode is 0700 and that of the files 0600, for any umask. Sockets are in a separate folder: the path of a
unix socket has at most 107 characters.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ftis_node.errors import ConfigError, FtisError, MachineError, UsageError
from ftis_node.files import disk_full, is_disk_full, make_folder, open_to_write

MAX_NAME_BYTES = 255  # of a file or folder
LOCK_TRIES = 3
LOCK_PAUSE_S = 0.05
OTHERS = stat.S_IRWXG | stat.S_IRWXO
MAX_SOCKETS_PATH = 70  # the sockets' names need the rest
SOCKETS_PREFIX = "ftis-"
TOKEN_HEADER = "X-Ftis-Token"  # of HTTP requests that carry the token of `control_token`
NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "drvfs", "fuse.sshfs"})


def network_filesystem(path: Path) -> str | None:
    """Return the type of the file system of an existing `path` if SQLite cannot lock files there, else None.

    `9p` and `drvfs` are the Windows drives of WSL.
    """
    import psutil

    place = path.resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[folder] for folder in (place, *place.parents) if folder in mounts), "")
    return kind if kind in NETWORK_FILESYSTEMS else None


def default_home() -> Path:
    """Return the home of a command without `--home`. Raises ConfigError for a user without a home folder."""
    import platformdirs  # slow to import: most commands get --home

    if not os.path.isabs(os.path.expanduser("~")):  # as in a container whose user id has no name
        raise ConfigError("this user has no home folder: give --home, or set HOME")
    return Path(platformdirs.user_data_dir("ftis-node"))


def give_user_folder(folder: Path) -> None:
    """Make `folder` the home folder of a user who cannot write to one, for the caches and settings of libraries.

    A cache of the hub in a home folder that can only be read stays in use.
    """
    usual = os.path.expanduser("~")
    if os.path.isabs(usual) and os.access(usual, os.W_OK):
        return
    hub_cache = os.path.join(usual, ".cache", "huggingface")
    if os.path.isabs(usual) and os.path.isdir(hub_cache) and not os.environ.keys() & {"HF_HOME", "XDG_CACHE_HOME"}:
        os.environ["HF_HOME"] = hub_cache
    os.environ["HOME"] = str(folder.absolute())
    try:
        getpass.getuser()
    except (KeyError, OSError):  # torch names a folder after the user
        os.environ["USER"] = f"uid-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class _Inside:
    """The path of an entry of the home, as an attribute of `Home`."""

    name: str

    def __get__(self, home: Home, _: type[Home]) -> Path:
        return home.root / self.name


@dataclass(frozen=True, slots=True)
class Home:
    """Paths in a node's home. The constructor reads and writes nothing.

    Raises ConfigError for a path that no file system takes.
    """

    root: Path

    def __post_init__(self) -> None:
        if (longest := max(map(len, map(os.fsencode, self.root.parts)), default=0)) > MAX_NAME_BYTES:
            raise ConfigError(f"--home has a name of {longest} bytes, at most {MAX_NAME_BYTES}: give a shorter one")

    identity = _Inside("identity.key")
    marker = _Inside("home.json")
    damaged = _Inside("damaged")
    node_toml = _Inside("node.toml")
    run_toml = _Inside("run.toml")
    settings = _Inside("settings.json")  # of the last start, all sources together
    replay = _Inside("replay.sqlite")
    peers = _Inside("peers.sqlite")
    control_token = _Inside("control.token")
    observe_token = _Inside("observe.token")
    checkpoints = _Inside("checkpoints")
    weights = _Inside("weights")
    events = _Inside("events.jsonl")
    status = _Inside("status.json")
    logs = _Inside("logs")
    user = _Inside("user")
    swarm_secret = _Inside("swarm.secret")
    pause = _Inside("pause.json")
    lock = _Inside("lock")  # held while a node runs, with its pid and the address of its status port

    @property
    def sockets(self) -> Path:
        """Folder of unix sockets: `run` in the home, or a private temporary folder if that path is too long.

        The temporary folder has a new name at each start of a node, and `run` links to it.
        """
        inside = self._run
        return inside if len(str(inside)) <= MAX_SOCKETS_PATH else self._linked_sockets() or inside

    @property
    def _run(self) -> Path:
        return self.root.absolute() / "run"

    def _linked_sockets(self) -> Path | None:
        """Return the target of the link `run`; None if it is not a link, or if no node made the target."""
        import tempfile

        try:
            target = Path(os.readlink(self._run))
            info = target.lstat()
        except OSError:
            return None
        is_named_so = target.parent == Path(tempfile.gettempdir()) and target.name.startswith(SOCKETS_PREFIX)
        return target if is_named_so and stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() else None

    def create(self) -> None:
        """Create the folders. Raises ConfigError if that fails, MachineError if the disk is full."""
        try:
            for folder in (self.root, self.checkpoints, self.weights, self.logs):
                make_folder(folder)
            self._remove_sockets()
            self._make_sockets()
        except OSError as error:
            raise self._unusable(error) from None

    def make_logs(self) -> None:
        """Create the home and its folder of logs. Raises as `create`."""
        try:
            make_folder(self.logs)
        except OSError as error:
            raise self._unusable(error) from None

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the home's lock. Raises UsageError if another node holds it.

        The lock is the kernel's, so it ends with the process. Inside, this process and those that it starts write files
        that only the owner can read.
        """
        umask = os.umask(OTHERS)
        try:
            with self._locked():
                self.create()
                try:
                    yield
                finally:
                    self._remove_sockets()
        finally:
            os.umask(umask)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            make_folder(self.root)
            if (kind := network_filesystem(self.root)) is not None:
                raise MachineError(f"{self.root} is on a network file system ({kind}): give a local folder with --home")
            descriptor = open_to_write(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._take_lock(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            self._close_to_others()
            yield
        finally:
            os.close(descriptor)

    def _close_to_others(self) -> None:
        """Remove the access of group and others to the folder; below a folder of 0700 no file can be reached.

        A mounted volume belongs to the system and its group to the container, so its mode may stay. Raises ConfigError
        for a folder that all users share, and if others could still read it.
        """
        mode = stat.S_IMODE(self.root.stat().st_mode)
        if mode & stat.S_ISVTX:
            raise ConfigError(f"{self.root} is shared by all users: give a private folder with --home")
        try:
            if mode & OTHERS:
                self.root.chmod(mode & ~OTHERS)
        except PermissionError:
            if mode & stat.S_IRWXO:
                raise ConfigError(f"{self.root} is open to all users: chmod 700 it, or give another --home") from None

    def _remove_sockets(self) -> None:
        if (linked := self._linked_sockets()) is not None:
            shutil.rmtree(linked, ignore_errors=True)
        if self._run.is_symlink():
            self._run.unlink(missing_ok=True)
        else:
            shutil.rmtree(self._run, ignore_errors=True)

    def _make_sockets(self) -> None:
        if len(str(self._run)) <= MAX_SOCKETS_PATH:
            self._run.mkdir(mode=0o700)
            return
        import tempfile

        self._run.symlink_to(tempfile.mkdtemp(prefix=SOCKETS_PREFIX))  # no other user can guess the name

    def _take_lock(self, descriptor: int) -> None:
        """Lock for this process; retry briefly, because a reader may hold the lock for a moment."""
        for attempt in range(LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_S * (attempt + 1))
            else:
                return
        owner = self.lock.read_text().split("\n", 1)[0] or "unknown"
        raise UsageError(f"{self.root} is in use by a running node (pid {owner}): stop it, or give another --home")

    def _unusable(self, error: OSError) -> FtisError:
        if is_disk_full(error, self.root):
            return disk_full(self.root)
        return ConfigError(f"cannot use {self.root} as home: {error.strerror}; give another with --home")

    def publish_address(self, url: str) -> None:
        """Write the status port's URL into the lock file; `status` and other commands read it."""
        self.lock.write_text(f"{os.getpid()}\n{url}\n")

    def running_url(self) -> str | None:
        """Return the status URL of the node that runs on this home; None if none runs, or if it is still starting."""
        lines = self.lock.read_text().split("\n") if self.is_held() else []
        return lines[1] if len(lines) > 1 and lines[1] else None

    def holder(self) -> int | None:
        """Return the process id of the node that runs on this home or is starting; None if none does."""
        pid = self.lock.read_text().split("\n", 1)[0] if self.is_held() else ""
        return int(pid) if pid.isdecimal() else None

    def is_opened_by(self, pid: int) -> bool:
        """Return whether a process has the lock open. A holder in another container has the number of another process.

        Raises PermissionError for a process of another user.
        """
        with suppress(FileNotFoundError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    if entry.samefile(self.lock):
                        return True
        return False

    def is_held(self) -> bool:
        """Return whether a node runs on this home or is starting, also on a read-only file system.

        Raises ConfigError if this user may not read the lock.
        """
        try:
            descriptor = open_to_write(self.lock, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False
