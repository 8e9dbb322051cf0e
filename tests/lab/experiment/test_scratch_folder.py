"""The scratch folder with the homes of an experiment is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftis_node.lab.experiment.runner import SCRATCH_PREFIX, scratch_folder

NO_PROCESS = 2**22 + 1  # above the kernel's largest pid


def test_a_folder_is_removed_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="error"), scratch_folder(tmp_path) as folder:
        (folder / "home").mkdir()
        raise ValueError("error")
    assert list(tmp_path.iterdir()) == []


def test_folders_of_dead_processes_are_removed_and_of_others_kept(tmp_path: Path) -> None:
    (tmp_path / f"{SCRATCH_PREFIX}{NO_PROCESS}" / "home").mkdir(parents=True)
    (tmp_path / f"{SCRATCH_PREFIX}{os.getppid()}").mkdir()
    with scratch_folder(tmp_path) as folder:
        assert folder.is_dir()
        names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{SCRATCH_PREFIX}{os.getpid()}", f"{SCRATCH_PREFIX}{os.getppid()}"}
