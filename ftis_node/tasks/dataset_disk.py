"""The disk that a data set of the hub takes: what is announced before, the limit, and the removal of its files.

The child process that reads a data set writes announcements to stderr, each a line of JSON. They name the folders in
which the libraries write, and a scratch folder for what they unpack. The first one is sent before anything is fetched,
the second one, with a text for the user, before the data are. While the child runs, the parent adds up the files there
that are new. Above the limit it ends the child, and removes these files. A small archive can unpack to many times its
size, and another person may have named it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from ftis_node.telemetry.terminal_text import size

log = logging.getLogger(__name__)
MAX_DISK_BYTES: Final = 4 << 30
"""Of the download, the unpacked files and the prepared rows together. No setting: 256 MiB of text is the limit of what
is used of them (`dataset_rows.MAX_OUTPUT_BYTES`), and a local file, which takes no further disk, serves for the rest.
"""
FREE_SHARE: Final = 0.5  # a data set takes at most this share of the free disk
WATCH_EVERY_S: Final = 0.1
MARK: Final = b"announcement: "
BLOCK_BYTES: Final = 512  # the unit of `st_blocks`


@dataclass(frozen=True, slots=True)
class DownloadNotice:
    """What a child is about to write: the text for the user, where, and the limit.

    A file in `folders` or `scratch` is new if its inode changed after `since_ns`, a time of that file system.
    """

    folders: tuple[str, ...]
    scratch: str
    since_ns: int
    limit_bytes: int
    text: str = ""

    def send(self) -> None:
        """Write it to stderr, for the parent."""
        sys.stderr.write(f"\n{MARK.decode()}{json.dumps(asdict(self))}\n")
        sys.stderr.flush()

    def new_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files that the child wrote, and their status."""
        for folder in (*self.folders, self.scratch):
            for path in Path(folder).rglob("*"):
                try:
                    status = path.lstat()
                except OSError:  # renamed or removed meanwhile
                    continue
                if not stat.S_ISDIR(status.st_mode) and status.st_ctime_ns >= self.since_ns:
                    yield path, status

    def taken_bytes(self) -> int:
        """Return the bytes on the disk that the new files take."""
        return sum(status.st_blocks * BLOCK_BYTES for _, status in self.new_files())

    def remove(self) -> None:
        """Remove the new files, and the folders that are then empty."""
        for path, _ in list(self.new_files()):
            path.unlink(missing_ok=True)
        for folder in map(Path, self.folders):
            for path in sorted((folder, *folder.rglob("*")), reverse=True):  # a folder after those inside
                if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                    path.rmdir()


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child: exit code, output, and the limit of disk if the parent ended it for that."""

    returncode: int
    stdout: bytes
    stderr: bytes
    passed_bytes: int | None = None


def scratch_folder(near: Path) -> Path | None:
    """Return a new folder in the folder `near`, which is created; None if this user may not write there."""
    try:
        near.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="ftis-node-", dir=near))
    except OSError:
        return None


def limit_for(folder: Path, max_bytes: int) -> int:
    """Return the bytes that a data set may take on the disk of the folder."""
    return min(max_bytes, int(shutil.disk_usage(folder).free * FREE_SHARE))


def too_large(source: str, limit_bytes: int, why: str) -> str:
    """Return the error of a data set above the limit of disk."""
    room = "" if limit_bytes >= MAX_DISK_BYTES else "free disk space, or "
    advice = f"{room}give the columns that you need as a local file"
    return f"{source} takes more than {size(limit_bytes)} of disk ({why}): {advice}"


def run_watched(command: Sequence[str]) -> Ended:
    """Run a child to its end, under the limit of its announcement. Its scratch folder is removed."""
    announced: DownloadNotice | None = None
    is_over = False
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        try:
            while process.poll() is None and not is_over:
                _wait(process)
                before, announced = announced, _announced(stderr)
                if announced is not None and announced.text and announced != before:
                    log.warning("%s", announced.text)
                is_over = announced is not None and announced.taken_bytes() > announced.limit_bytes
        finally:
            process.kill()
            process.wait()
            if is_over and announced is not None:
                announced.remove()
            if announced is not None:
                shutil.rmtree(announced.scratch, ignore_errors=True)
        passed = announced.limit_bytes if is_over and announced is not None else None
        lines = [line for line in _content(stderr).splitlines(keepends=True) if not line.startswith(MARK)]
        return Ended(process.returncode, _content(stdout), b"".join(lines), passed)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(WATCH_EVERY_S)
    except subprocess.TimeoutExpired:
        return


def _announced(stderr: IO[bytes]) -> DownloadNotice | None:
    """Return the newest announcement in the child's output so far."""
    whole = _content(stderr).rpartition(b"\n")[0].splitlines()
    found = [line for line in whole if line.startswith(MARK)]
    if not found:
        return None
    values = json.loads(found[-1].removeprefix(MARK))
    return DownloadNotice(**values | {"folders": tuple(values["folders"])})


def _content(file: IO[bytes]) -> bytes:
    """Return what the child has written, without a move of the position that it writes at."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def begin_in(folder: Path) -> int:
    """Return the time, in the clock of the folder's file system, from which files are new."""
    time.sleep(0.01)  # the clock of a file system advances in steps of up to 10 ms
    (folder / "begin").touch()
    return (folder / "begin").lstat().st_ctime_ns
