"""`dataset:`: what a hostile query or file cannot reach or break."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftis_node.errors import TaskError
from ftis_node.tasks import load_task
from tests.tasks.test_dataset import QUERY, write

if TYPE_CHECKING:
    from pathlib import Path


def test_a_whole_number_of_any_length_is_a_reference(tmp_path: Path) -> None:
    task = load_task(f"dataset:{write(tmp_path / 'x.jsonl', [{'q': 'x', 'a': 10**400}])}?{QUERY}")
    assert task[0].answer == "1" + 400 * "0"


def test_a_repository_never_means_a_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private/notes").mkdir(parents=True)
    write(tmp_path / "private/notes/notes.csv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        TaskError, match=r"private/notes \(train\): a folder or file here has the name of the repository"
    ):
        load_task(f"dataset:x?hub=private/notes&{QUERY}")
