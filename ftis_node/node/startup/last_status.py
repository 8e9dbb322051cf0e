"""The status that the last start saved in `status.json`, and the marks of start and end in that file."""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec

from ftis_node.config.home import Home
from ftis_node.errors import FileError
from ftis_node.files import read_file, read_object, replace_file
from ftis_node.telemetry.status import EndWord, Status
from ftis_node.workers.durable import checkpoint_step

STARTING = "starting"


def read_last_status(home: Home) -> Status:
    """Return the status that the last start saved; an empty status if the file is missing or damaged."""
    try:
        return Status.from_json(read_file(home.status))
    except (OSError, FileError, msgspec.MsgspecError):
        return Status()


def read_saved_status(home: Home) -> Status:
    """Return the last status if the home has the checkpoint of its last step, or a later one; else an empty one.

    The newest checkpoint is older if the disk was full, or if the operator restored one. The node then repeats the
    steps after it.
    """
    last = read_last_status(home)
    return last if checkpoint_step(home.checkpoints) >= last.learner.step else Status()


def mark_start(home: Home) -> None:
    """Save that the node starts, so that `status` after a kill shows neither an older end nor an empty home."""
    _change_node(home, state=STARTING, end="")


def mark_end(home: Home, end: EndWord) -> None:
    """Save how a start ended whose loops never ran. If they ran, the status loop saves the end."""
    if read_last_status(home).node.state == STARTING:
        with suppress(OSError):  # a full disk
            _change_node(home, state="stopped", end=end.value)


def _change_node(home: Home, **changes: str) -> None:
    try:
        document = read_object(home.status) if home.status.exists() else json.loads(Status().to_json())
    except (OSError, FileError):
        return  # the status loop replaces a damaged file
    if isinstance(document.get("node"), dict):
        document["node"] |= changes
        replace_file(home.status, json.dumps(document, indent=1).encode())
