"""Faults of files: truncated and corrupted files, databases that another program locks, and a full disk.

A file is damaged after a kill -9, while no node uses it. So the next start reads the damaged content.
"""

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path

from tests.chaos.faults.base import Ends, Fault, FaultContext, Refusal, trains
from tests.chaos.observation.watch import watch_of

MAX_CORRUPTED_BYTES = 16
SHORTEST_LOCK_S, LONGEST_LOCK_S = 2.0, 25.0
FREE_BYTES = 96 << 20
FULL_WITHIN_S = 600.0  # with a start on a busy machine
WRONG_USE = 2  # exit code


def kill_daemon(context: FaultContext) -> None:
    """Kill the daemon, and read its event log before a fault may damage that file."""
    context.node.stop(signal.SIGKILL)
    watch_of(context.node).read_event_log()


def corrupt_bytes(context: FaultContext, path: Path) -> None:
    """Change some bytes at random positions."""
    data = bytearray(path.read_bytes())
    positions = sorted(context.rng.randrange(len(data)) for _ in range(context.rng.randint(1, MAX_CORRUPTED_BYTES)))
    for position in positions:
        data[position] ^= context.rng.randint(1, 255)
    context.notes.append(f"{path.name}: bytes {', '.join(map(str, positions))}")
    path.write_bytes(data)


def truncate(context: FaultContext, path: Path) -> None:
    """Cut the file at a random position."""
    size = path.stat().st_size
    remaining = context.rng.randrange(1, size)
    context.notes.append(f"{path.name}: {remaining} of {size} bytes remain")
    os.truncate(path, remaining)


def damage(context: FaultContext, name: str, how: Callable[[FaultContext, Path], None]) -> None:
    """Damage the file `name` of the home after a kill; do nothing if it is missing or empty."""
    kill_daemon(context)
    path = context.node.home / name
    if path.exists() and path.stat().st_size:
        how(context, path)


def damage_checkpoint(context: FaultContext, how: Callable[[FaultContext, Path], None]) -> None:
    """Damage one file of the newest checkpoint."""
    kill_daemon(context)
    newest = sorted((context.node.home / "checkpoints").glob("step-*/COMPLETE"))[-1].parent
    how(context, newest / context.rng.choice(("weights.safetensors", "optimizer.safetensors", "state.json")))


def damage_all_checkpoints(context: FaultContext) -> None:
    """Truncate the weights of every checkpoint until the node has refused to start."""
    kill_daemon(context)
    for path in (context.node.home / "checkpoints").glob("step-*/weights.safetensors"):
        _restore_later(context, path)
        truncate(context, path)
    context.refusal = Refusal(WRONG_USE, "can be read")


def damage_key(context: FaultContext) -> None:
    """Change one digit of the key until the node has refused to start."""
    kill_daemon(context)
    path = context.node.home / "identity.key"
    _restore_later(context, path)
    text = path.read_text()
    position = context.rng.randrange(64)
    path.write_text(text[:position] + ("0" if text[position] != "0" else "1") + text[position + 1 :])
    context.notes.append(f"digit {position}")
    context.refusal = Refusal(WRONG_USE, "put a copy of it back")


def damage_settings(context: FaultContext) -> None:
    """Make node.toml invalid. The node cannot reconstruct it, because a person wrote it."""
    kill_daemon(context)
    path = context.node.home / "node.toml"
    _restore_later(context, path)
    path.write_bytes(path.read_bytes()[:-3] + b"\n[learner\n")
    context.refusal = Refusal(WRONG_USE, "node.toml")


def damage_event_log(context: FaultContext) -> None:
    """Replace some lines of the event log with garbage."""
    kill_daemon(context)
    path = context.node.home / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for number in sorted(context.rng.sample(range(len(lines)), k=min(3, len(lines)))):
        lines[number] = bytes(byte ^ 0x80 for byte in lines[number][:-1]) + b"\n"
        context.notes.append(f"line {number}")
    path.write_bytes(b"".join(lines))


def lock(context: FaultContext, name: str) -> None:
    """Lock the database for a while, as another program that writes."""
    locked_s = context.rng.uniform(SHORTEST_LOCK_S, LONGEST_LOCK_S)
    context.notes.append(f"for {locked_s:.0f} s")
    with closing(sqlite3.connect(context.node.home / name, timeout=LONGEST_LOCK_S, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(locked_s)
        other.execute("ROLLBACK")


def fill_disk(context: FaultContext) -> None:
    """Move the home to a small disk and fill it while the node runs; free it once the node pauses."""
    node, home = context.node, context.node.home
    assert node.stop() == 0, node.last_log_line()
    size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) + FREE_BYTES
    _mount_over(context, home, size)
    node.start()
    assert node.wait_for(node.is_ready, timeout_s=FULL_WITHIN_S), node.last_log_line()
    filler = home / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
    except OSError as error:  # the node writes too, so the free space is not known beforehand
        assert error.errno == errno.ENOSPC, error
    assert node.wait_for(lambda: node.status("limits", "paused"), timeout_s=FULL_WITHIN_S), node.last_log_line()
    filler.unlink()
    resumes = node.wait_for(lambda: node.status("limits", "paused") == "", timeout_s=FULL_WITHIN_S)
    assert resumes, node.last_log_line()
    assert node.stop() == 0, node.last_log_line()


def _mount_over(context: FaultContext, home: Path, num_bytes: int) -> None:
    """Mount a small disk over the home and copy the files to it. Undoing copies them back and unmounts it."""
    moved = home.with_name(f"{home.name}.moved")
    home.rename(moved)
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(home)], check=True)
    shutil.copytree(moved, home, symlinks=True, dirs_exist_ok=True)

    def unmount() -> None:
        shutil.rmtree(moved)
        shutil.copytree(home, moved, symlinks=True, ignore=shutil.ignore_patterns("run"))
        subprocess.run(["umount", "--lazy", str(home)], check=True)
        home.rmdir()
        moved.rename(home)

    context.undoing.callback(unmount)


def _restore_later(context: FaultContext, path: Path) -> None:
    data, mode = path.read_bytes(), path.stat().st_mode

    def restore() -> None:
        if path.parent.exists():  # a node may have removed an old checkpoint
            path.write_bytes(data)
            path.chmod(mode)

    context.undoing.callback(restore)


@cache
def _can_mount() -> bool:
    if not shutil.which("mount") or os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
    return done.returncode == 0


EMPTY_BUFFER = "The damaged file is set aside, the buffer starts empty, and no step uses a group twice."
LOST_COMMITS = "The event log shows the lost commits. The buffer starts empty. No group or number is used twice."
NEW_PEERS = "The damaged file is set aside. All peers are new."
OLDER_CHECKPOINT = "The checkpoint is set aside, the next older one is loaded, and the lost step is repeated."
REFUSES = "It does not start, prints one line that says what to do (exit code 2), and changes no file."
_fault, RESTARTS = partial(Fault, "files"), Ends.RESTARTS
FAULTS = (
    _fault("database-corrupted", EMPTY_BUFFER, partial(damage, name="replay.sqlite", how=corrupt_bytes), RESTARTS),
    _fault("database-truncated", EMPTY_BUFFER, partial(damage, name="replay.sqlite", how=truncate), RESTARTS),
    _fault("wal-corrupted", LOST_COMMITS, partial(damage, name="replay.sqlite-wal", how=corrupt_bytes), RESTARTS),
    _fault("wal-truncated", LOST_COMMITS, partial(damage, name="replay.sqlite-wal", how=truncate), RESTARTS),
    _fault("peers-corrupted", NEW_PEERS, partial(damage, name="peers.sqlite", how=corrupt_bytes), RESTARTS),
    _fault("peers-truncated", NEW_PEERS, partial(damage, name="peers.sqlite", how=truncate), RESTARTS),
    _fault("event-log-garbage", "All readers skip lines that are no events.", damage_event_log, RESTARTS),
    _fault("manifest-truncated",
           "The manifest of --run replaces it if the home is of that run. Else it refuses to start (exit code 2).",
           partial(damage, name="run.toml", how=truncate), RESTARTS),
    _fault("checkpoint-corrupted", OLDER_CHECKPOINT, partial(damage_checkpoint, how=corrupt_bytes), RESTARTS, trains),
    _fault("checkpoint-truncated", OLDER_CHECKPOINT, partial(damage_checkpoint, how=truncate), RESTARTS, trains),
    _fault("all-checkpoints-truncated", REFUSES, damage_all_checkpoints, Ends.REFUSES, trains),
    _fault("key-corrupted", REFUSES, damage_key, Ends.REFUSES),
    _fault("settings-damaged", REFUSES, damage_settings, Ends.REFUSES),
    _fault("database-locked", "It waits for the lock, for up to a minute.", partial(lock, name="replay.sqlite")),
    _fault("peers-locked", "Bans and reputation are saved after the lock. Nothing else waits for it.",
           partial(lock, name="peers.sqlite")),
    _fault("disk-full", "It pauses, serves its peers, and continues by itself when there is space.", fill_disk,
           RESTARTS, lambda _: _can_mount()),
)  # fmt: skip
