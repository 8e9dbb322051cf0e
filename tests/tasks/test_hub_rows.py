"""Rows of the hub, which are streamed and kept for starts without it; GSM8K and MATH-500 from local files."""

import json
import logging
import socket
from pathlib import Path

import pytest

from ftis_node.errors import NetworkError, TaskError
from ftis_node.records.group import PromptRef
from ftis_node.tasks import dataset_rows, held_out_spec, load_task
from ftis_node.tasks.dataset_query import RowSource
from ftis_node.tasks.dataset_rows import read_rows
from tests.hub_stand_in import TOKEN, Repository, running_stand_in
from tests.tasks.test_dataset import QUERY

ROWS = b"".join(json.dumps({"q": f"{i}+1=", "a": i + 1, "more": None}).encode() + b"\n" for i in range(10))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder of the hub's libraries."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    dataset_rows._read.cache_clear()
    return tmp_path / "hf"


@pytest.fixture
def hub(home, monkeypatch):
    with running_stand_in() as hub:
        hub.repositories["datasets/o/n"] = Repository(private=False, branches={"main": {"train.jsonl": ROWS}})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_rows_are_streamed_and_kept(hub, home, monkeypatch, caplog):
    spec = f"dataset:o/n?split=train[2:4]&{QUERY}"
    task = load_task(spec)
    assert [(task[i].prompt[0]["content"], task[i].answer) for i in range(len(task))] == [("2+1=", "3"), ("3+1=", "4")]
    (kept,) = (path for path in home.rglob("*") if path.is_file())
    assert kept.parent == home / "ftis-node"
    assert caplog.messages == ["o/n (train[2:4]): reading its columns q and a from the hub"]
    assert caplog.records[0].levelno == logging.WARNING  # shown by every command
    with pytest.raises(TaskError, match=r"o/n \(train\) has no column 'b': its columns are 'q', 'a', 'more'"):
        load_task("dataset:o/n?prompt=q&answer=b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    dataset_rows._read.cache_clear()
    assert load_task(spec)[1] == task[1]
    assert "HF_HUB_OFFLINE is set" in caplog.messages[-1]
    with pytest.raises(NetworkError, match=r"o/n \(test\) from the hub .*: give a local file as dataset:PATH"):
        load_task(f"dataset:o/n?test=test&{QUERY}", split="test")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("spec", "advice"), [("gsm8k", "gsm8k:PATH"), ("math500", "math500:PATH")])
def test_an_unreachable_hub_is_a_network_error_without_long_retries(monkeypatch, spec, advice):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(NetworkError, match=rf"^cannot get .* \(test\) from the hub \(.*refused.*{advice}$"):
            load_task(spec, split="test")


@pytest.mark.usefixtures("home")
def test_a_hub_that_does_not_answer_is_an_error_after_the_time_limit(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(NetworkError, match=r"gsm8k \(test\): not read within 0.5 s: give a local file as FILE"):
            read_rows(RowSource(("q",), hub="openai/gsm8k", split="test"), limit_s=0.5, instead="FILE")


@pytest.mark.usefixtures("home")
def test_a_source_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private/notes").mkdir(parents=True)
    with pytest.raises(TaskError, match=r"^private/notes \(train\): a folder or file here has the name of the repo"):
        load_task(f"dataset:x?hub=private/notes&{QUERY}")
    with pytest.raises(TaskError, match=r"the split must be NAME or NAME\[FIRST:END\]"):
        load_task(f"dataset:o/n?split=train[:10%25]&{QUERY}")


def test_a_data_set_of_the_hub_has_the_splits_that_its_spec_names():
    with pytest.raises(TaskError, match="names no split of held-out problems: add test=SPLIT"):
        load_task(f"dataset:o/n?{QUERY}", split="test")
    assert held_out_spec(f"dataset:o/n?{QUERY}") is None
    assert held_out_spec(f"dataset:o/n?{QUERY}&test=test") is not None


CLIPS = {"question": "How many clips did Natalia sell in both months?", "answer": "24 clips in May.\n#### 72"}
MILES = {"question": "How far did he drive?", "answer": "1,000 + 80 = <<1000+80=1080>>1080\n#### 1,080"}
POLAR = {
    "problem": "Convert the point $(0,3)$ to polar coordinates.", "solution": "...",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "Precalculus", "level": 2,
    "unique_id": "test/precalculus/807.json",
}  # fmt: skip


def _write(file: Path, *rows: object) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_gsm8k_is_read_from_a_file(tmp_path):
    task = load_task(f"gsm8k:{_write(tmp_path / 'any name.jsonl', CLIPS, MILES)}", split="test")
    item = task[1]
    assert (task.name, task.split, len(task)) == ("gsm8k", "test", 2)
    assert (item.ref, item.answer) == (PromptRef("gsm8k", "test", 1), "1,080")
    assert task.score(item, "<think>t</think><answer>1080</answer>") == 1.0
    assert [message["role"] for message in item.prompt] == ["system", "user"]
    assert item.prompt[1]["content"] == MILES["question"]
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in item.prompt[0]["content"]
    assert task.resolve(item.ref) == item


def test_math500_is_read_from_a_file(tmp_path):
    task = load_task(f"math500:{_write(tmp_path / 'test.jsonl', POLAR)}", split="test")
    assert (task[0].prompt[1]["content"], task[0].answer) == (POLAR["problem"], POLAR["answer"])
    assert task.name == "math500"


def test_a_tilde_in_a_path_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / "train.jsonl", CLIPS)
    assert len(load_task("gsm8k:~/train.jsonl")) == 1


def test_blank_lines_are_ignored(tmp_path):
    assert len(load_task(f"gsm8k:{_write(tmp_path / 'train.jsonl', CLIPS, '', MILES, ' ')}")) == 2


def test_math500_has_no_training_problems_on_the_hub():
    with pytest.raises(TaskError, match=r"^math500 is for evaluation, .* give a file .* as math500:PATH$"):
        load_task("math500")
