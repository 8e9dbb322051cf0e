"""Think blocks that a chat template opens: what is scored, and what a peer may name."""

import pytest

from ftis_node.records.think_block import after_thinking, is_opening, split_opening, whole_answer
from ftis_node.tasks import load_task
from ftis_node.tasks.answers import final_answer

EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("opening", "completion", "answer"),
    [
        ("<think>\n", "12 and 30 </think> <answer> 42 </answer>", "42"),
        ("<think>", "</think><answer>42</answer>", "42"),
        (EMPTY, "<answer>42</answer>", "42"),
        (EMPTY, "<think> 12 and 30 </think> <answer>42</answer>", "42"),
        ("", "<think> 12 and 30 </think> <answer>42</answer>", "42"),
        ("<think>\n", "<think> x </think> <answer> 42 </answer>", None),  # one tag too many
        ("", "x </think> <answer> 42 </answer>", None),  # one too few
    ],
)
def test_an_answer_is_in_format_with_its_opening(opening, completion, answer):
    assert final_answer(whole_answer(opening, completion)) == answer


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("assistant\n<think>\n", ("assistant\n", "<think>\n")),
        (f"assistant\n{EMPTY}", ("assistant\n", EMPTY)),
        ("assistant\n", ("assistant\n", "")),
        ("<think> reason </think> assistant\n", ("<think> reason </think> assistant\n", "")),
        ("<think>a<think>", ("<think>a", "<think>")),
    ],
)
def test_a_prompt_is_divided_before_its_opening(prompt, expected):
    assert split_opening(prompt) == expected


@pytest.mark.parametrize("text", ["<answer>", "<think> the answer is 42", "x<think>", "<think></think>42", "</think>"])
def test_a_peer_may_name_only_a_think_block(text):
    assert not is_opening(text)
    assert is_opening("") and is_opening(EMPTY) and is_opening("<think>")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("<think>\n12 and 30</think> 42", " 42"),
        (f"{EMPTY}42", "\n\n42"),
        ("<think>\n42", "\n42"),  # the block never ends
        ("12</think>42", "12</think>42"),
    ],
)
def test_a_task_without_tags_reads_the_text_after_the_block(text, answer):
    assert after_thinking(text) == answer


def test_the_tasks_without_tags_use_it():
    item = load_task("arithmetic")[0]
    task = load_task("arithmetic")
    assert task.score(item, f"<think> carry </think> {item.answer}") == 1.0
    assert task.score(item, f"<think> {item.answer}") == 1.0
    assert task.score(item, f"{item.answer} </think>") == 0.0
