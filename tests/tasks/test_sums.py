"""The task `sums` has the same problems on every machine, and scores only the text after the last mark."""

from hashlib import blake2b
from pathlib import Path

import pytest

from ftis_node.errors import TaskError
from ftis_node.records.group import PromptRef
from ftis_node.tasks import load_task
from ftis_node.tasks.sums import NUM_TEST, SumsTask

NUM_DRAWS = 3000
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "split", "digest"),
    [
        ("sums", "train", "49cd36c6f785e56b"),
        ("sums", "test", "2de4f7cce284327a"),
        ("sums:long", "train", "b8426dc20207b286"),
        ("sums:long", "test", "d1308e5429cd26d3"),
    ],
)
def test_the_problems_of_every_spec_do_not_change(name, split, digest):
    """Nodes of two releases with different problems would refuse each other's groups."""
    task = SumsTask(split, name=name)
    texts = " ".join(task.problem(index).text for index in range(min(len(task), NUM_DRAWS)))
    assert blake2b(texts.encode(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize(("name", "num_digits"), [("sums", 3), ("sums:long", 4)])
def test_no_held_out_problem_is_trained_on_in_either_order(name, num_digits):
    train, test = SumsTask("train", name=name), SumsTask("test", name=name)
    held_out = {frozenset(test.problem(index)[:2]) for index in range(len(test))}
    shown = [train.problem(index) for index in range(NUM_DRAWS)]
    assert len(test) == NUM_TEST == len({test.problem(index) for index in range(len(test))})
    assert not held_out & {frozenset(problem[:2]) for problem in shown}
    assert {len(str(number)) for problem in shown for number in problem[:2]} == {num_digits}
    assert min(problem.left for problem in shown) < 1.1 * 10 ** (num_digits - 1)
    assert max(problem.right for problem in shown) > 0.99 * 10**num_digits


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("5+3=8;5+7=12;5+1+1=7;#728", 1.0),
        ("#728", 1.0),
        ("# 728 ", 1.0),
        ("#727#728", 1.0),
        ("#728#727", 0.0),
        ("728", 0.0),
        ("#0728", 0.0),
        ("#728.", 0.0),
        ("#7 28", 0.0),
        ("", 0.0),
    ],
)
def test_the_text_after_the_last_mark_is_the_answer(text, reward):
    task = load_task("sums")
    assert task.score(task[0], text) == reward


def test_the_page_determines_the_problems():
    """This follows docs/train/tasks.md."""

    def number(text):
        return int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "little")

    def draw(text):
        return 100 + number(text) % 900, 100 + number(text) // 900 % 900

    def is_held_out(left, right):
        return number(f"{max(left, right)}+{min(left, right)}") % 16 == 0

    train, test = SumsTask("train"), SumsTask("test")
    for index in range(200):
        drawn = (draw(f"train/{index}/{attempt}") for attempt in range(1000))
        assert tuple(train.problem(index)[:2]) == next(pair for pair in drawn if not is_held_out(*pair))
    drawn_for_test = (draw(f"test/{attempt}") for attempt in range(20_000))
    held_out = list(dict.fromkeys(pair for pair in drawn_for_test if is_held_out(*pair)))
    assert [tuple(test.problem(index)[:2]) for index in range(NUM_TEST)] == held_out[:NUM_TEST]
    row = next(
        line for line in (ROOT / "docs/train/tasks.md").read_text().splitlines() if line.startswith("| `sums` | 5")
    )
    assert row.split(" | ")[1:8] == [train.problem(index).text for index in range(7)]


def test_unknown_splits_names_indices_and_references_are_errors():
    with pytest.raises(TaskError, match="no split 'dev'"):
        SumsTask("dev")
    with pytest.raises(TaskError, match="use sums or sums:long"):
        load_task("sums:short")
    with pytest.raises(IndexError):
        SumsTask("test")[NUM_TEST]
    with pytest.raises(KeyError):
        SumsTask("train").resolve(PromptRef("sums:long", "train", 0))
