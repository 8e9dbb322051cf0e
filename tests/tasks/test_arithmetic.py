"""The task `arithmetic` has the problems that docs/train/tasks.md describes, the same on every machine."""

import re
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path

import pytest

from ftis_node.records.group import PromptRef
from ftis_node.tasks import load_task
from ftis_node.tasks.arithmetic import PARTS, ArithmeticProblem, ArithmeticTask
from ftis_node.tasks.base import Task

NUM_DRAWS = 4000


@pytest.mark.parametrize(
    ("parts", "split", "digest"),
    [
        ("both", "train", "2373480e910f5bab"),
        ("both", "test", "a741d60b9a03f560"),
        ("add", "train", "7829444ec225b369"),
        ("add", "test", "bc50e0029cf95bf9"),
        ("sub", "train", "c421d371e7266f90"),
        ("sub", "test", "02423ebb6146eb9c"),
        ("easy", "train", "1092bf02e2d27f39"),
        ("medium", "train", "9a325ff579adb3ff"),
        ("hard", "train", "58a426e55e356218"),
    ],
)
def test_the_problems_of_every_spec_do_not_change(parts, split, digest):
    task = ArithmeticTask(split, parts=parts)
    texts = " ".join(task.problem(index).text for index in range(min(len(task), 3000)))
    assert blake2b(texts.encode(), digest_size=8).hexdigest() == digest


def test_the_parts_by_difficulty_share_the_held_out_problems_of_their_kind():
    assert _problems("test", "easy")[0] in _problems("test", "add")
    assert {*_problems("test", "easy"), *_problems("test", "medium")} == set(_problems("test", "add"))
    assert set(_problems("test", "hard")) < set(_problems("test", "sub"))


@pytest.mark.parametrize("parts", PARTS)
def test_no_held_out_problem_is_trained_on_in_either_order(parts):
    held_out = {problem.canonical for problem in _problems("test", "both")}
    trained = {problem.canonical for problem in _problems("train", parts)}
    assert len(trained) > 350
    assert not held_out & trained
    assert not {problem.canonical for problem in _problems("test", parts)} & trained


def test_lengths_and_names():
    assert len(ArithmeticTask("train")) == 2**31
    assert [len(ArithmeticTask("test", parts=parts)) for parts in ("both", "add", "sub")] == [512, 256, 256]
    assert [ArithmeticTask(parts=parts).name for parts in ("both", "add", "sub")] == [
        "arithmetic",
        "arithmetic:add",
        "arithmetic:sub",
    ]
    assert isinstance(ArithmeticTask(), Task)
    assert not ArithmeticTask.isolate_scoring


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
    task = ArithmeticTask(split, parts=parts)
    return [task.problem(index) for index in range(min(len(task), NUM_DRAWS))]


PAGE = (Path(__file__).parents[2] / "docs/train/tasks.md").read_text(encoding="utf-8")
OPERANDS = range(10, 100)
KINDS = {"arithmetic": "+-", "arithmetic:easy": "+", "arithmetic:medium": "+", "arithmetic:hard": "-"}
KINDS |= {"arithmetic:no-carry": "+", "arithmetic:carry": "+", "arithmetic:borrow": "-"}
NUM_OWN = {"arithmetic:no-carry": 500, "arithmetic:carry": 500, "arithmetic:borrow": 500}


def hash_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "little")


def answer(kind: str, a: int, b: int) -> int:
    return a + b if kind == "+" else a - b


@cache
def held_out(kind: str) -> frozenset[str]:
    texts = [f"{a}{kind}{b}=" for a in OPERANDS for b in OPERANDS if b <= a and answer(kind, a, b) in OPERANDS]
    return frozenset(sorted(texts, key=hash_of)[:256])


@cache
def own_test(task: str) -> list[str]:
    kind = KINDS[task]
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if b <= a and answer(kind, a, b) in OPERANDS]
    texts = []
    for a, b in sorted(
        (pair for pair in pairs if asks(task, *pair)), key=lambda pair: hash_of(f"{pair[0]}{kind}{pair[1]}=")
    ):
        texts.append(f"{a}{kind}{b}=")
        if kind == "+" and a != b:
            texts.append(f"{b}+{a}=")
    return texts[: NUM_OWN[task]]


def is_held_out(task: str, kind: str, larger: int, smaller: int) -> bool:
    forms = {f"{larger}{kind}{smaller}=", f"{smaller}{kind}{larger}="}
    return bool(forms & held_out(kind)) or (task in NUM_OWN and bool(forms & set(own_test(task))))


def asks(task: str, a: int, b: int) -> bool:
    ones = a % 10, b % 10
    return {
        "arithmetic": True,
        "arithmetic:easy": sum(ones) <= 9,
        "arithmetic:medium": sum(ones) >= 10,
        "arithmetic:hard": ones[0] < ones[1],
        "arithmetic:no-carry": sum(ones) <= 9,
        "arithmetic:carry": sum(ones) >= 10,
        "arithmetic:borrow": ones[0] < ones[1],
    }[task]


def problem(task: str, index: int) -> tuple[str, str]:
    kinds = KINDS[task]
    kind = kinds[hash_of(f"train/{index}") % len(kinds)]
    for k in count():
        drawn = hash_of(f"train/{index}/{k}")
        a, b = 10 + drawn % 90, 10 + drawn // 90 % 90
        larger, smaller = max(a, b), min(a, b)
        if kind == "-":
            a, b = larger, smaller
        is_in_task = answer(kind, a, b) in OPERANDS and asks(task, a, b)
        if is_in_task and not is_held_out(task, kind, larger, smaller):
            return f"{a}{kind}{b}=", str(answer(kind, a, b))
    raise AssertionError


@pytest.mark.parametrize("name", KINDS)
def test_the_page_determines_the_problems(name):
    task = load_task(name, split="train")
    for index in (*range(300), 2**31 - 1):
        item = task[index]
        assert ([{"role": "user", "content": problem(name, index)[0]}], problem(name, index)[1]) == (
            [dict(message) for message in item.prompt],
            item.answer,
        )


@pytest.mark.parametrize("name", NUM_OWN)
def test_the_page_determines_the_test_splits_of_500(name):
    task = load_task(name, split="test")
    assert [str(task[index].prompt[0]["content"]) for index in range(len(task))] == own_test(name)


def test_the_problems_on_the_page_are_those_of_the_task():
    rows = re.findall(r"^\| `(arithmetic[:\w]*)` \| (\d\d[+-]\d\d=.*) \|$", PAGE, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["arithmetic", "arithmetic:hard"]
    for name, shown in rows:
        for index, text in enumerate(filter(None, map(str.strip, shown.split("|")))):
            assert problem(name, index)[0] == text
