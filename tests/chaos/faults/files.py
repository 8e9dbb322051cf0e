"""A node's files: cut off, with bytes turned, gone, held by another program, and a disk without room.

A file is harmed while no node runs on it, after a kill -9: as a disk does between two starts, and so that what is
harmed is what the next start reads.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.faults.base import Ends, Fault, trains
from tests.chaos.observing.observe import watch_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.scene import Scene

MOST_BYTES_TURNED = 16
SHORTEST_HOLD_S, LONGEST_HOLD_S = 2.0, 25.0
ROOM_BYTES = 96 << 20
FULL_WITHIN_S = 600.0  # with a start on a busy machine
WRONG_USE, CANNOT = 2, 3  # exit codes
HEAL = "tests/node/startup/test_recovery.py::"
CHECKPOINTS = "tests/learner/checkpoint/test_learner_checkpoint.py::"


def end(scene: Scene) -> None:
    """kill -9 of the daemon. What its trail says until then is remembered: the trail itself may be harmed next."""
    scene.node.stop(signal.SIGKILL)
    watch_of(scene.node).remember()


def turn_bytes(scene: Scene, path: Path) -> None:
    """Some bytes anywhere in the file are others."""
    data = bytearray(path.read_bytes())
    places = sorted(scene.rng.randrange(len(data)) for _ in range(scene.rng.randint(1, MOST_BYTES_TURNED)))
    for place in places:
        data[place] ^= scene.rng.randint(1, 255)
    scene.note(f"{path.name}: bytes {', '.join(map(str, places))}")
    path.write_bytes(data)


def cut_off(scene: Scene, path: Path) -> None:
    """The end of the file is missing."""
    size = path.stat().st_size
    left = scene.rng.randrange(1, size)
    scene.note(f"{path.name}: {left} of {size} bytes left")
    os.truncate(path, left)


def remove(scene: Scene, path: Path) -> None:
    """The file is gone."""
    scene.note(f"{path.name} removed")
    path.unlink()


def harm(scene: Scene, name: str, how: Callable[[Scene, Path], None]) -> None:
    """Harms the home's file `name` after a kill; without one (an empty log of writes) nothing is done."""
    end(scene)
    path = scene.node.home / name
    if path.exists() and path.stat().st_size:
        how(scene, path)


def harm_checkpoint(scene: Scene, how: Callable[[Scene, Path], None]) -> None:
    """One file of the newest checkpoint."""
    end(scene)
    newest = sorted((scene.node.home / "checkpoints").glob("step-*/COMPLETE"))[-1].parent
    how(scene, newest / scene.rng.choice(("weights.safetensors", "optimizer.safetensors", "state.json")))


def harm_all_checkpoints(scene: Scene) -> None:
    """The weights of every checkpoint; put back when the node has refused."""
    end(scene)
    for path in (scene.node.home / "checkpoints").glob("step-*/weights.safetensors"):
        _put_back_later(scene, path)
        cut_off(scene, path)
    scene.expect_refusal(WRONG_USE, "can be read")


def harm_key(scene: Scene) -> None:
    """One digit of the key; put back when the node has refused."""
    end(scene)
    path = scene.node.home / "identity.key"
    _put_back_later(scene, path)
    text = path.read_text()
    place = scene.rng.randrange(64)
    path.write_text(text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :])
    scene.note(f"digit {place}")
    scene.expect_refusal(WRONG_USE, "identity restore")


def harm_settings(scene: Scene) -> None:
    """node.toml is a person's own words: what is in it cannot be guessed."""
    end(scene)
    path = scene.node.home / "node.toml"
    _put_back_later(scene, path)
    path.write_bytes(path.read_bytes()[:-3] + b"\n[learner\n")
    scene.expect_refusal(WRONG_USE, "node.toml")


def harm_trail(scene: Scene) -> None:
    """Lines of the trail are garbage."""
    end(scene)
    path = scene.node.home / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for place in sorted(scene.rng.sample(range(len(lines)), k=min(3, len(lines)))):
        lines[place] = bytes(byte ^ 0x80 for byte in lines[place][:-1]) + b"\n"
        scene.note(f"line {place}")
    path.write_bytes(b"".join(lines))


def hold(scene: Scene, name: str) -> None:
    """Another program writes to the database and takes its time."""
    held_s = scene.rng.uniform(SHORTEST_HOLD_S, LONGEST_HOLD_S)
    scene.note(f"for {held_s:.0f} s")
    with closing(sqlite3.connect(scene.node.home / name, timeout=LONGEST_HOLD_S, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(held_s)
        other.execute("ROLLBACK")


def fill_disk(scene: Scene) -> None:
    """The home moves to a small disk, which is filled while the node runs; the next start finds no room either."""
    node, home = scene.node, scene.node.home
    assert node.stop() == 0, node.last_words()
    with tempfile.TemporaryDirectory(prefix="small-disk", dir=home.parent) as folder:
        shutil.copytree(home, Path(folder) / "home", symlinks=True)
    size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) + ROOM_BYTES
    _mount_over(scene, home, size)
    node.start()
    assert node.wait_for(node.is_well, timeout_s=FULL_WITHIN_S), node.last_words()
    filler = home / "filler"
    scene.undo(lambda: filler.unlink(missing_ok=True))
    try:
        with filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
    except OSError as error:  # the node writes, too: how much room there is, nobody knows beforehand
        assert error.errno == errno.ENOSPC, error
    code = node.process.wait(timeout_s=FULL_WITHIN_S)
    words = node.last_words()  # the learner's, if its checkpoint is the first to find no room
    says_so = "the disk is full" in words or os.strerror(errno.ENOSPC) in words
    assert (code, says_so) == (CANNOT, True), f"{code}: {words}"
    scene.expect_refusal(CANNOT, "the disk is")


def _mount_over(scene: Scene, home: Path, num_bytes: int) -> None:
    """A small disk with the home's files in the place of the home; what the node leaves there is kept afterwards."""
    away = home.with_name(f"{home.name}.away")
    home.rename(away)
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(home)], check=True)
    shutil.copytree(away, home, symlinks=True, dirs_exist_ok=True)

    def back() -> None:
        shutil.rmtree(away)
        shutil.copytree(home, away, symlinks=True, ignore=shutil.ignore_patterns("run"))
        subprocess.run(["umount", "--lazy", str(home)], check=True)
        home.rmdir()
        away.rename(home)

    scene.undo(back)


def _put_back_later(scene: Scene, path: Path) -> None:
    data, mode = path.read_bytes(), path.stat().st_mode

    def put_back() -> None:
        path.write_bytes(data)
        path.chmod(mode)

    scene.undo(put_back)


def _cannot_mount() -> str:
    if not shutil.which("mount") or os.geteuid() != 0:
        return "a small disk cannot be mounted without root"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
    return "" if done.returncode == 0 else "no small disk can be mounted here"


def _saved(name: str, shown_by: str, inject: Callable[[Scene], None], promise: str) -> Fault:
    return Fault(name, "files", promise, HEAL + shown_by, inject, Ends.RESTARTS)


BUFFER = "test_a_damaged_buffer_starts_empty_and_nothing_is_used_twice"
BOOK = "test_peers_that_can_be_read_keep_their_standing"
SAVED = "The damaged file is kept aside, the buffer starts empty, and no step uses a group twice."
BEHIND = "The event log shows the lost commits. The buffer starts empty: no group is used twice, no number given twice."
FELL_BACK = "The checkpoint is set aside and the next older one is taken; its lost step is done again."
REFUSES = "It does not start, says in one line what to do (exit code 2), and touches nothing."
FAULTS = (
    _saved("database-turned", BUFFER, partial(harm, name="replay.sqlite", how=turn_bytes), SAVED),
    _saved("database-cut", BUFFER, partial(harm, name="replay.sqlite", how=cut_off), SAVED),
    _saved("wal-turned", "test_commits_that_a_write_ahead_log_lost_are_missed",
           partial(harm, name="replay.sqlite-wal", how=turn_bytes), BEHIND),
    _saved("wal-cut", "test_commits_that_a_write_ahead_log_lost_are_missed",
           partial(harm, name="replay.sqlite-wal", how=cut_off), BEHIND),
    _saved("peers-turned", BOOK, partial(harm, name="peers.sqlite", how=turn_bytes),
           "The damaged file is kept aside; peers that can be read keep their standing."),
    _saved("peers-cut", BOOK, partial(harm, name="peers.sqlite", how=cut_off),
           "The damaged file is kept aside; peers that can be read keep their standing."),
    _saved("trail-garbage", "test_lines_that_are_no_events_are_skipped_and_reported_once", harm_trail,
           "Lines that are no events are left out by all readers, and one event counts them."),
    _saved("manifest-turned", "test_a_damaged_manifest_is_refused_until_the_run_is_named",
           partial(harm, name="run.toml", how=cut_off),
           "The manifest of --run takes its place if the home is of that run; else one line, exit code 2."),
    Fault("checkpoint-turned", "files", FELL_BACK, CHECKPOINTS + "test_a_damaged_checkpoint_is_skipped_and_reported",
          partial(harm_checkpoint, how=turn_bytes), Ends.RESTARTS, fits=trains),
    Fault("checkpoint-cut", "files", FELL_BACK, CHECKPOINTS + "test_a_damaged_checkpoint_is_skipped_and_reported",
          partial(harm_checkpoint, how=cut_off), Ends.RESTARTS, fits=trains),
    Fault("all-checkpoints-cut", "files", REFUSES,
          CHECKPOINTS + "test_checkpoints_that_are_all_unreadable_are_an_error", harm_all_checkpoints, Ends.REFUSES,
          fits=trains),
    Fault("key-turned", "files", REFUSES, HEAL + "test_a_turned_bit_in_the_key_is_no_other_peer",
          harm_key, Ends.REFUSES),
    Fault("settings-damaged", "files", REFUSES,
          "tests/config/test_node.py::test_a_bad_file_is_named_in_one_line", harm_settings, Ends.REFUSES),
    Fault("database-busy", "files", "It waits for up to a minute, and no longer than the other program.",
          HEAL + "test_a_buffer_that_another_program_holds_is_not_called_damaged",
          partial(hold, name="replay.sqlite")),
    Fault("peers-busy", "files", "Bans and trust are saved when the file is free; nothing waits for it.",
          HEAL + "test_a_peer_book_that_another_program_holds_is_saved_later", partial(hold, name="peers.sqlite")),
    Fault("disk-full", "files", "It ends with one line (exit code 3), starts on no full disk, goes on where it was.",
          "tests/config/test_disk_room.py::test_what_is_told_of_it", fill_disk, Ends.REFUSES, missing=_cannot_mount),
)  # fmt: skip
