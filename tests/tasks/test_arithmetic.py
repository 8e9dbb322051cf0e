"""The task `arithmetic` has the problems that docs/train/tasks.md describes, the same on every machine."""

import re
from pathlib import Path

import pytest

from ftis_node.records.group import PromptRef
from ftis_node.tasks import load_task
from ftis_node.tasks.arithmetic import PARTS, ArithmeticProblem, ArithmeticTask

NUM_DRAWS = 4000


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
