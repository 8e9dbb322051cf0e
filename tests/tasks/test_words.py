"""The task `words` has the same problems on every machine, holds problems out, and scores the last number."""

from pathlib import Path

import pytest

from ftis_node.config.manifest import preset_for_task
from ftis_node.errors import TaskError
from ftis_node.tasks import load_task
from ftis_node.tasks.words import FORMS, WordProblem, WordsTask

NUM_DRAWS = 2000
PAGE = Path(__file__).parents[2] / "docs/train/words.md"


def regardless_of_order(problem: WordProblem) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return problem.form.text, tuple(sorted(problem.numbers[:2])), problem.numbers[2:]


def question(task: WordsTask, index: int) -> str:
    return task[index].prompt[-1]["content"]


def test_no_held_out_problem_is_trained_on_with_other_names():
    train, test = WordsTask("train"), WordsTask("test")
    held_out = {regardless_of_order(test.problem(index)) for index in range(len(test))}
    shown = [train.problem(index) for index in range(NUM_DRAWS)]
    assert len(test) == len(held_out) == 512
    assert not held_out & set(map(regardless_of_order, shown))
    assert {problem.form for problem in shown} == {form for level in "1234" for form in FORMS[level]}


@pytest.mark.parametrize(("part", "length"), [("1", 102), ("2", 145), ("3", 512), ("4", 453), ("unseen", 512)])
def test_no_two_problems_of_a_test_split_differ_in_names_or_order_alone(part, length):
    test = WordsTask("test", part=part)
    assert len({regardless_of_order(test.problem(index)) for index in range(len(test))}) == len(test) == length


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("5", 1.0), ("12 - 7 = 5.", 1.0), ("The answer is **5** coins.", 1.0), ("5.00", 1.0), ("1,005", 0.0),
        ("5 coins, because 12 - 7 = 5", 1.0), ("5, as 12 less 7", 0.0), ("-5", 0.0), ("5.5", 0.0), ("five", 0.0),
        ("٥", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_the_last_number_is_the_answer(text, reward):
    task = load_task("words")
    item = next(task[index] for index in range(NUM_DRAWS) if task[index].answer == "5")
    assert task.score(item, text) == reward


def test_the_page_has_the_forms_of_the_task():
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `words:")]
    shown = [(part, text, ranges, order) for part, text, ranges, order, _ in rows]
    assert shown == [
        (
            f"`words:{part}`",
            form.text,
            ", ".join(f"{values.start}-{values[-1]}" for values in form.numbers),
            "yes" if form.falls else "no",
        )
        for part, forms in FORMS.items()
        for form in forms
    ]


def test_unknown_parts_and_splits_are_errors():
    with pytest.raises(TaskError, match="use words, words:1"):
        load_task("words:9")
    with pytest.raises(TaskError, match="no split 'train': use test"):
        load_task("words:unseen", "train")
    assert preset_for_task("words:2") == "words-ftis"
