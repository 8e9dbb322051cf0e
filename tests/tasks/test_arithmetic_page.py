"""docs/train/tasks.md says which problem an index of `arithmetic` is: made again here by that text alone."""

from __future__ import annotations

import re
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path

import pytest

from ftis_node.tasks import load_task

PAGE = (Path(__file__).parents[2] / "docs/train/tasks.md").read_text(encoding="utf-8")
OPERANDS = range(10, 100)
KINDS = {"arithmetic": "+-", "arithmetic:easy": "+", "arithmetic:medium": "+", "arithmetic:hard": "-"}
KINDS |= {"arithmetic:no-carry": "+", "arithmetic:carry": "+", "arithmetic:borrow": "-"}
NUM_OWN = {"arithmetic:no-carry": 500, "arithmetic:carry": 500, "arithmetic:borrow": 500}


def h(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "little")


def answer(kind: str, a: int, b: int) -> int:
    return a + b if kind == "+" else a - b


@cache
def held_out(kind: str) -> frozenset[str]:
    texts = [f"{a}{kind}{b}=" for a in OPERANDS for b in OPERANDS if b <= a and answer(kind, a, b) in OPERANDS]
    return frozenset(sorted(texts, key=h)[:256])


@cache
def own_test(task: str) -> list[str]:
    kind = KINDS[task]
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if b <= a and answer(kind, a, b) in OPERANDS]
    texts = []
    for a, b in sorted((pair for pair in pairs if asks(task, *pair)), key=lambda pair: h(f"{pair[0]}{kind}{pair[1]}=")):
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
    kind = kinds[h(f"train/{index}") % len(kinds)]
    for k in count():
        drawn = h(f"train/{index}/{k}")
        a, b = 10 + drawn % 90, 10 + drawn // 90 % 90
        larger, smaller = max(a, b), min(a, b)
        if kind == "-":
            a, b = larger, smaller
        is_in_task = answer(kind, a, b) in OPERANDS and asks(task, a, b)
        if is_in_task and not is_held_out(task, kind, larger, smaller):
            return f"{a}{kind}{b}=", str(answer(kind, a, b))
    raise AssertionError


@pytest.mark.parametrize("name", KINDS)
def test_the_page_is_enough_to_make_the_problems(name: str) -> None:
    task = load_task(name, split="train")
    for index in (*range(300), 2**31 - 1):
        item = task[index]
        assert ([{"role": "user", "content": problem(name, index)[0]}], problem(name, index)[1]) == (
            [dict(message) for message in item.prompt],
            item.answer,
        )


@pytest.mark.parametrize("name", NUM_OWN)
def test_the_page_is_enough_to_make_the_test_splits_of_500(name: str) -> None:
    task = load_task(name, split="test")
    assert [str(task[index].prompt[0]["content"]) for index in range(len(task))] == own_test(name)


def test_the_pages_problems_are_the_tasks() -> None:
    rows = re.findall(r"^\| `(arithmetic[:\w]*)` \| (\d\d[+-]\d\d=.*) \|$", PAGE, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["arithmetic", "arithmetic:hard"]
    for name, told in rows:
        for index, text in enumerate(filter(None, map(str.strip, told.split("|")))):
            assert problem(name, index)[0] == text


@pytest.mark.parametrize(
    ("text", "reward"),
    [("10", 1.0), (" 10\n", 1.0), ("010", 0.0), ("+10", 0.0), ("10.0", 0.0), ("10 1", 0.0), ("", 0.0)],
)
def test_the_reward_is_as_the_page_says(text: str, reward: float) -> None:
    task = load_task("arithmetic", split="train")
    assert task[0].answer == "10"
    assert task.score(task[0], text) == reward
