"""The status file of a home's last start. A start clears the end of the start before, so a killed node shows none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from ftis_node.config.disk_room import replace_file
from ftis_node.errors import FileError
from ftis_node.files import read_file, read_object
from ftis_node.node.startup.preflight import checkpoint_step
from ftis_node.telemetry.status import Status

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.telemetry.status import EndWord

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
    return last if checkpoint_step(home) >= last.learner.step else Status()


def mark_start(home: Home) -> None:
    """Clear the saved end of the last start, so that a node killed during model loading does not show it."""
    _change_node(home, state=STARTING, end="")


def mark_end(home: Home, end: EndWord) -> None:
    """Save how a start ended whose loops never ran. If they ran, the status loop saves the end."""
    if read_last_status(home).node.state == STARTING:
        _change_node(home, state="stopped", end=end.value)


def _change_node(home: Home, **changes: str) -> None:
    try:
        document = read_object(home.status)
    except (OSError, FileError):
        return  # no file before the first start; the status loop replaces a damaged one
    if isinstance(document.get("node"), dict):
        document["node"] |= changes
        replace_file(home.status, json.dumps(document, indent=1).encode())
