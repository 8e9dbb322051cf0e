"""GSM8K and MATH-500 from local files and from the hub; an invalid row is an error with file and line."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from ftis_node.errors import NetworkError, TaskError
from ftis_node.records.group import PromptRef
from ftis_node.tasks import dataset_rows as rows_module
from ftis_node.tasks import load_task
from ftis_node.tasks.dataset_rows import RowSource, read_rows

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


HUB_LIBRARY = """
import json, sys
class Rows(list):
    column_names = ["question", "answer"]

    def select_columns(self, names):
        return [{{name: row.get(name) for name in names}} for row in self]

class Builder:
    cache_dir = "/"  # which exists: nothing is downloaded

    def download_and_prepare(self):
        sys.stderr.write("a warning\\n")

    def as_dataset(self, split):
        if split != "test":
            raise ValueError("BuilderConfig not found")
        return Rows(json.loads({rows!r}))

def load_dataset_builder(name, config, revision):
    if name != "openai/gsm8k" or config != "main":
        raise ValueError("BuilderConfig not found")
    return Builder()
"""


@pytest.fixture
def unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub with a closed port, and an empty cache."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    rows_module._read.cache_clear()


def _install_library(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: object) -> None:
    """Install a fake of `datasets` with these rows."""
    (folder / "datasets.py").write_text(HUB_LIBRARY.format(rows=json.dumps(rows)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))


@pytest.mark.usefixtures("unreachable_hub")
def test_rows_of_the_hub_are_read_like_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_library(tmp_path, monkeypatch, CLIPS, MILES)
    task = load_task("gsm8k", split="test")
    assert [task[index].answer for index in range(len(task))] == ["72", "1,080"]


@pytest.mark.usefixtures("unreachable_hub")
def test_the_error_names_an_invalid_row_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_library(tmp_path, monkeypatch, CLIPS, {"question": "q"})
    with pytest.raises(TaskError, match=r"openai/gsm8k \(test\): row 2: the column 'answer'"):
        load_task("gsm8k", split="test")


@pytest.mark.usefixtures("unreachable_hub")
def test_an_error_of_the_hub_is_a_network_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_library(tmp_path, monkeypatch)
    with pytest.raises(NetworkError, match=r"\(ValueError: BuilderConfig not found\): give a local file as gsm8k:PATH"):
        load_task("gsm8k", split="train")


@pytest.mark.usefixtures("unreachable_hub")
def test_an_unreachable_hub_is_a_network_error_without_long_retries() -> None:
    with pytest.raises(NetworkError) as caught:
        load_task("gsm8k", split="test")
    assert "OfflineModeIsEnabled" in str(caught.value)  # the library alone would retry for 24 s or 400 s
    assert "cannot get openai/gsm8k (test) from the hub" in str(caught.value)
    assert "gsm8k:PATH" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_an_error_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(NetworkError, match=r"gsm8k \(test\): not read within 0.5 s: give a local file as FILE"):
            read_rows(RowSource(("q",), hub="openai/gsm8k", split="test"), limit_s=0.5, instead="FILE")
