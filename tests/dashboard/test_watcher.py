"""The snapshot of a node that cannot be read contains the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.dashboard.watcher import Watcher
from tests.dashboard.sample_node import STATUS


def test_a_home_whose_lock_cannot_be_opened_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in `poll` would end the dashboard."""

    def refuse(home: Home) -> bool:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "status.json").write_bytes(STATUS.to_json())
    monkeypatch.setattr(Home, "is_held", refuse)
    snapshot = Watcher(Home(tmp_path)).poll()
    assert "Permission denied" in snapshot.problem and not snapshot.is_live
