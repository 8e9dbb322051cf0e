"""The homes of an experiment leave nothing behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ftis_node.lab.experiment.runner import SCRATCH_PREFIX, scratch_folder

if TYPE_CHECKING:
    from pathlib import Path

NO_PROCESS = 2**22 + 1  # above the kernel's largest pid


def test_a_folder_is_removed_also_after_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fault"), scratch_folder(tmp_path) as folder:
        (folder / "home").mkdir()
        raise ValueError("fault")
    assert list(tmp_path.iterdir()) == []


def test_what_the_dead_left_is_removed_and_the_living_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / f"{SCRATCH_PREFIX}{NO_PROCESS}" / "home").mkdir(parents=True)
    (tmp_path / f"{SCRATCH_PREFIX}{os.getppid()}").mkdir()
    with scratch_folder(tmp_path) as folder:
        assert folder.is_dir()
        names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{SCRATCH_PREFIX}{os.getpid()}", f"{SCRATCH_PREFIX}{os.getppid()}"}
