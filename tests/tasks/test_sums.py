"""The task `sums` has the same problems on every machine, and scores only the text after the last mark."""

from pathlib import Path

import pytest

from ftis_node.tasks import load_task
from ftis_node.tasks.sums import SumsTask

NUM_DRAWS = 3000


@pytest.mark.parametrize(("part", "num_digits"), [("", 3), ("long", 4)])
def test_no_held_out_problem_is_trained_on_in_either_order(part, num_digits):
    train, test = SumsTask("train", part), SumsTask("test", part)
    held_out = {frozenset(test.problem(index)[:2]) for index in range(len(test))}
    shown = [train.problem(index) for index in range(NUM_DRAWS)]
    assert len(test) == 1024 == len({test.problem(index) for index in range(len(test))})
    assert not held_out & {frozenset(problem[:2]) for problem in shown}
    assert {len(str(number)) for problem in shown for number in problem[:2]} == {num_digits}
    assert min(problem.left for problem in shown) < 1.1 * 10 ** (num_digits - 1)
    assert max(problem.right for problem in shown) > 0.99 * 10**num_digits


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("5+3=8;5+7=12;5+1+1=7;#728", 1.0), ("#728", 1.0), ("# 728 ", 1.0), ("#727#728", 1.0), ("#728#727", 0.0),
        ("728", 0.0), ("#0728", 0.0), ("#728.", 0.0), ("#7 28", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_the_text_after_the_last_mark_is_the_answer(text, reward):
    task = load_task("sums")
    assert task.score(task[0], text) == reward


def test_the_problems_on_the_page_are_those_of_the_task():
    page = (Path(__file__).parents[2] / "docs/train/tasks.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `sums` | 5"))
    assert row.split(" | ")[1:8] == [SumsTask().problem(index).text for index in range(7)]
