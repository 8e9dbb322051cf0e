"""GSM8K and MATH-500 from local files and from the hub; an invalid row is an error with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftis_node.errors import TaskError
from ftis_node.records.group import PromptRef
from ftis_node.tasks import load_task

CLIPS = {"question": "How many clips did Natalia sell in both months?", "answer": "24 clips in May.\n#### 72"}
MILES = {"question": "How far did he drive?", "answer": "1,000 + 80 = <<1000+80=1080>>1080\n#### 1,080"}
POLAR = {
    "problem": "Convert the point $(0,3)$ to polar coordinates.",
    "solution": "...",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}


def _write(file: Path, *rows: object) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_gsm8k_is_read_from_a_file(tmp_path: Path) -> None:
    task = load_task(f"gsm8k:{_write(tmp_path / 'any name.jsonl', CLIPS, MILES)}", split="test")
    item = task[1]
    assert (task.name, task.split, len(task)) == ("gsm8k", "test", 2)
    assert item.ref == PromptRef("gsm8k", "test", 1)
    assert item.answer == "1,080"
    assert task.score(item, "<think>t</think><answer>1080</answer>") == 1.0
    assert [message["role"] for message in item.prompt] == ["system", "user"]
    assert item.prompt[1]["content"] == MILES["question"]
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in item.prompt[0]["content"]
    assert task.resolve(item.ref) == item


def test_math500_is_read_from_a_file(tmp_path: Path) -> None:
    task = load_task(f"math500:{_write(tmp_path / 'test.jsonl', POLAR)}", split="test")
    assert task[0].prompt[1]["content"] == POLAR["problem"]
    assert task[0].answer == POLAR["answer"]
    assert task.name == "math500"


def test_a_tilde_in_a_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / "train.jsonl", CLIPS)
    assert len(load_task("gsm8k:~/train.jsonl")) == 1


def test_blank_lines_at_the_end_are_ignored(tmp_path: Path) -> None:
    assert len(load_task(f"gsm8k:{_write(tmp_path / 'train.jsonl', CLIPS, '', ' ')}")) == 1


def test_math500_has_no_training_problems_on_the_hub() -> None:
    with pytest.raises(TaskError, match=r"^math500 is for evaluation, .* give a file .* as math500:PATH$"):
        load_task("math500")
