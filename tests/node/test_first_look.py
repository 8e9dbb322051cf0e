"""Whether the last steps reached the disk: the look at a node's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.config.home import Home
from ftis_node.errors import MachineError
from ftis_node.node import first_look

if TYPE_CHECKING:
    from pathlib import Path

NOTHING: Any = None


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home saved at step 7 whose disk has room for 99 bytes, beside checkpoints of 100."""
    checkpoint = tmp_path / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    monkeypatch.setattr(first_look, "free_bytes", lambda path: 99)
    monkeypatch.setattr(first_look, "checkpoint_bytes", lambda source, settings: 100)
    return Home(tmp_path)


def test_steps_that_found_no_room_are_told_at_the_end(home: Home) -> None:
    with pytest.raises(MachineError, match="no checkpoint after step 7 of 9 .* make room and start again"):
        first_look.check_saved(home, NOTHING, NOTHING, step=9)
    first_look.check_saved(home, NOTHING, NOTHING, step=7)


def test_where_there_is_room_the_disk_is_not_to_blame(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "free_bytes", lambda path: 100)
    first_look.check_saved(home, NOTHING, NOTHING, step=9)
