"""A look at a node that cannot be read is a snapshot with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.config.home import Home
from ftis_node.dashboard.watcher import Watcher
from tests.dashboard.made_up import STATUS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_home_that_is_read_only_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock cannot be opened. Any exception of a look ends the dashboard."""

    def refuse(home: Home) -> bool:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "status.json").write_bytes(STATUS.to_json())
    monkeypatch.setattr(Home, "is_held", refuse)
    snapshot = Watcher(Home(tmp_path)).poll()
    assert "Permission denied" in snapshot.problem and not snapshot.is_live
