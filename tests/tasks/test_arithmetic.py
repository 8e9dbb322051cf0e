"""The task `arithmetic` has the problems that docs/train/tasks.md describes, the same on every machine."""

import re
from hashlib import blake2b
from pathlib import Path

import pytest

from ftis_node.records.group import PromptRef
from ftis_node.tasks import load_task
from ftis_node.tasks.arithmetic import PARTS, ArithmeticProblem, ArithmeticTask

NUM_DRAWS = 4000


@pytest.mark.parametrize(
    ("parts", "split", "digest"),
    [
        ("", "train", "2373480e910f5bab"), ("", "test", "a741d60b9a03f560"), ("add", "train", "7829444ec225b369"),
        ("add", "test", "bc50e0029cf95bf9"), ("sub", "train", "c421d371e7266f90"),
        ("sub", "test", "02423ebb6146eb9c"), ("easy", "train", "1092bf02e2d27f39"),
        ("medium", "train", "9a325ff579adb3ff"), ("hard", "train", "58a426e55e356218"),
        ("no-carry", "train", "cb38874213031f1a"), ("no-carry", "test", "33bf1a60cb57d4b3"),
        ("carry", "test", "e319728c7f6d2f78"), ("borrow", "test", "5bb22587836f638b"),
    ],
)  # fmt: skip
def test_the_problems_of_every_spec_do_not_change(parts, split, digest):
    task = ArithmeticTask(split, parts)
    texts = " ".join(task.problem(index).text for index in range(min(len(task), 3000)))
    assert blake2b(texts.encode(), digest_size=8).hexdigest() == digest


def test_the_parts_by_difficulty_share_the_held_out_problems_of_their_kind():
    assert _problems("test", "easy")[0] in _problems("test", "add")
    assert {*_problems("test", "easy"), *_problems("test", "medium")} == set(_problems("test", "add"))
    assert set(_problems("test", "hard")) < set(_problems("test", "sub"))


@pytest.mark.parametrize("parts", PARTS)
def test_no_held_out_problem_is_trained_on_in_either_order(parts):
    held_out = {problem.canonical for problem in _problems("test", "")}
    trained = {problem.canonical for problem in _problems("train", parts)}
    assert len(trained) > 350
    assert not held_out & trained
    assert not {problem.canonical for problem in _problems("test", parts)} & trained


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("42", 1.0), (" 42\n", 1.0), ("43", 0.0), ("4 2", 0.0), ("042", 0.0), ("42.", 0.0), ("=42", 0.0), ("", 0.0),
        ("+42", 0.0), ("42.0", 0.0), ("42 1", 0.0),
    ],
)  # fmt: skip
def test_only_the_exact_answer_is_rewarded(completion, reward):
    task = ArithmeticTask("train")
    item = next(task[index] for index in range(NUM_DRAWS) if task[index].answer == "42")
    assert task.score(item, completion) == reward


def test_only_a_valid_reference_resolves():
    task = ArithmeticTask("test")
    assert task.resolve(PromptRef("arithmetic", "test", 511)) == task[511]
    for invalid in (("arithmetic", "test", 512), ("arithmetic", "test", -1), ("arithmetic", "train", 0),
                  ("arithmetic:add", "test", 0)):  # fmt: skip
        with pytest.raises(KeyError):
            task.resolve(PromptRef(*invalid))


def _problems(split: str, parts: str) -> list[ArithmeticProblem]:
    task = ArithmeticTask(split, parts)
    return [task.problem(index) for index in range(min(len(task), NUM_DRAWS))]


def test_the_problems_on_the_page_are_those_of_the_task():
    page = (Path(__file__).parents[2] / "docs/train/tasks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(arithmetic[:\w]*)` \| (\d\d[+-]\d\d=.*) \|$", page, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["arithmetic", "arithmetic:hard"]
    for name, shown in rows:
        texts = list(filter(None, map(str.strip, shown.split("|"))))
        assert [load_task(name)[index].prompt[0]["content"] for index in range(len(texts))] == texts
