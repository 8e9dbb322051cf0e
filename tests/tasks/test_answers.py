"""The answer that a completion votes for: equal answers give equal texts, and no completion raises an error."""

import json

import pytest

from ftis_node.tasks import load_task
from ftis_node.tasks.answers import answer_in, plain_answer
from tests.tasks.completions import think_answer

MALFORMED = (
    *("", " ", "\x00", "\ud800", "<answer>", "</answer><answer>", "$", "\\boxed{", "9" * 100_000, "-" * 10_000),
    *(
        "<think></think><answer></answer>", "<think>" * 10_000, "0" * 5000 + "." + "0" * 5000, "1," * 20_000,
        "((" * 5000,
    ),
    "<think></think><answer>" + "0" * 400 + "." + "0" * 90 + "x</answer>",
    "<think></think><answer>9^{9^{9^9}}</answer>",
)  # fmt: skip


@pytest.fixture
def gsm8k(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"question": "36 + 36?", "answer": "add\n#### 72"}) + "\n")
    return load_task(f"gsm8k:{file}", split="test")


def test_arithmetic_votes_with_the_text_that_is_scored():
    task = load_task("arithmetic", split="test")
    assert answer_in(task, task[0], " 42\n") == "42"
    assert answer_in(task, task[0], " \n") is None
    assert answer_in(task, task[0], "042") == "042", "its reward differs from that of 42"


@pytest.mark.parametrize(
    "text", ["72", " 72 ", "$72$", "\\boxed{72}", "\\(72\\)", "+72", "72.", "72.00", "072", "$ 72 $"]
)
def test_forms_of_one_number_are_one_answer(gsm8k, text):
    assert answer_in(gsm8k, gsm8k[0], think_answer(text)) == "72"
    assert gsm8k.score(gsm8k[0], think_answer(text)) == 1.0, "the reward agrees"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("1,000", "1000"), ("1{,}000", "1000"), ("12,345,678.50", "12345678.5"), ("-0.0", "0"), ("-0.50", "-0.5"),
        ("000", "0"), ("1,2", "1,2"), ("72 clips", "72 clips"), ("x  +\n1", "x + 1"),
        ("\\frac{1}{2}", "\\frac{1}{2}"), ("$5$ or $6$", "$5$ or $6$"), ("1.2.3", "1.2.3"), ("1e5", "1e5"),
    ],
)  # fmt: skip
def test_plain_answer_simplifies_only_numbers(text, plain):
    assert plain_answer(text) == plain


def test_a_completion_without_the_format_has_no_answer(gsm8k):
    for text in ("72", "<answer>72</answer>", think_answer("72") + " indeed", think_answer("")):
        assert answer_in(gsm8k, gsm8k[0], text) is None


def test_a_mixture_reads_the_answer_by_the_problems_part(gsm8k, tmp_path):
    task = load_task(f"arithmetic+gsm8k:{tmp_path / 'test.jsonl'}", split="test")
    by_part = {task[index].ref.task: task[index] for index in range(2)}
    assert answer_in(task, by_part["arithmetic"], "072") == "072"
    assert answer_in(task, by_part["gsm8k"], think_answer("072")) == "72"


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_text_does_not_raise(gsm8k, text):
    for task in (gsm8k, load_task("arithmetic", split="test"), load_task("rg:leg_counting", split="test")):
        for each in (text, think_answer(text)):
            answer = answer_in(task, task[0], each)
            assert answer is None or answer
