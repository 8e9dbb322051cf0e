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


def test_math500_trains_on_a_local_file(tmp_path: Path) -> None:
    task = load_task(f"math500:{_write(tmp_path / 'train.jsonl', POLAR)}", split="train")
    assert task[0].ref == PromptRef("math500", "train", 0)


def test_a_folder_has_both_splits(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", CLIPS)
    _write(tmp_path / "test.jsonl", MILES)
    assert load_task(f"gsm8k:{tmp_path}", split="train")[0].answer == "72"
    assert load_task(f"gsm8k:{tmp_path}", split="test")[0].answer == "1,080"


def test_a_tilde_in_a_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / "train.jsonl", CLIPS)
    assert len(load_task("gsm8k:~/train.jsonl")) == 1


@pytest.mark.parametrize(
    "ref",
    [
        PromptRef("gsm8k", "train", 1),
        PromptRef("gsm8k", "train", -1),
        PromptRef("gsm8k", "test", 0),
        PromptRef("x", "train", 0),
    ],
)
def test_invalid_references_raise_key_error(tmp_path: Path, ref: PromptRef) -> None:
    task = load_task(f"gsm8k:{_write(tmp_path / 'train.jsonl', CLIPS)}")
    with pytest.raises(KeyError):
        task.resolve(ref)


@pytest.mark.parametrize("index", [-1, 1])
def test_invalid_indices_raise_index_error(tmp_path: Path, index: int) -> None:
    task = load_task(f"gsm8k:{_write(tmp_path / 'train.jsonl', CLIPS)}")
    with pytest.raises(IndexError):
        task[index]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", ":2: invalid JSON"),
        ("", ":2: the line is empty"),
        ("[1]", ":2: the line must be a JSON object"),
        ("[" * 100_000, ":2: invalid JSON"),
        ({"answer": "#### 1"}, ": row 2: the column 'question' must be a text"),
        ({"question": " ", "answer": "#### 1"}, ": row 2: the column 'question' is empty"),
        ({"question": "q", "answer": None}, ": row 2: the column 'answer' must be a text"),
        ({"question": "q", "answer": "72"}, ": row 2: the column 'answer' has no text after '####'"),
        ({"question": "q \ud800", "answer": "#### 1"}, ": row 2: the column 'question' holds an unpaired surrogate"),
    ],
)
def test_the_error_names_an_invalid_line(tmp_path: Path, row: object, message: str) -> None:
    file = _write(tmp_path / "train.jsonl", MILES, row, CLIPS)
    with pytest.raises(TaskError) as caught:
        load_task(f"gsm8k:{file}")
    assert str(caught.value).startswith(f"{file}{message}")
    assert "\n" not in str(caught.value)


def test_the_error_names_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(json.dumps(CLIPS).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(TaskError, match=r"train\.jsonl:2: invalid JSON"):
        load_task(f"gsm8k:{file}")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(content)
    with pytest.raises(TaskError, match="train.jsonl has no rows"):
        load_task(f"gsm8k:{file}")


def test_blank_lines_at_the_end_are_ignored(tmp_path: Path) -> None:
    assert len(load_task(f"gsm8k:{_write(tmp_path / 'train.jsonl', CLIPS, '', ' ')}")) == 1


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="absent.jsonl: cannot be read .No such file"):
        load_task(f"gsm8k:{tmp_path}/absent.jsonl")
    with pytest.raises(TaskError, match=r"has none of test\.jsonl, test\.parquet, test\.csv"):
        load_task(f"math500:{tmp_path}", split="test")


def test_math500_has_no_training_problems_on_the_hub() -> None:
    with pytest.raises(TaskError, match=r"^math500 is for evaluation, .* give a file .* as math500:PATH$"):
        load_task("math500")
