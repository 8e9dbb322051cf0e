"""The status that a home keeps of its last start, from the start's first moment: a killed node leaves no old end."""

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
    """Return the status that the last start left, an empty one if there is none that can be read."""
    try:
        return Status.from_json(read_file(home.status))
    except (OSError, FileError, msgspec.MsgspecError):
        return Status()


def read_saved_status(home: Home) -> Status:
    """Return the last status if the home has the checkpoint of its last step, or a later one; else an empty one.

    An older checkpoint is left by a full disk, or put there by the operator. The steps after it are to be done again.
    """
    last = read_last_status(home)
    return last if checkpoint_step(home) >= last.learner.step else Status()


def mark_start(home: Home) -> None:
    """Clear the end of the start before, so that a node that is killed while models load does not repeat it."""
    _change_node(home, state=STARTING, end="")


def mark_end(home: Home, end: EndWord) -> None:
    """Note how a start ended whose loops never ran. Later ends are those that the status loop saved."""
    if read_last_status(home).node.state == STARTING:
        _change_node(home, state="stopped", end=end.value)


def _change_node(home: Home, **changes: str) -> None:
    try:
        document = read_object(home.status)
    except (OSError, FileError):
        return  # a first start; a damaged file is replaced by the status loop
    if isinstance(document.get("node"), dict):
        document["node"] |= changes
        replace_file(home.status, json.dumps(document, indent=1).encode())
