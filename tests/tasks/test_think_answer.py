"""The think-answer format: one block of each, in this order, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.tasks.answers import final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>x</think><answer>72</answer>", "72"),
        ("<think>\nx\n</think>\n<answer>\n72\n</answer>\n", "72"),
        ("  <think></think>\t<answer> a\nb </answer>", "a\nb"),
        ("<think>is a < b?</think><answer></answer>", ""),
    ],
)
def test_what_holds_the_format(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "72",
        "<answer>72</answer>",
        "<think>x</think>",
        "<think>x</think> 72",
        "<think>x</think><answer>72",
        "<think>x<answer>72</answer>",
        "x</think><answer>72</answer>",
        "<answer>72</answer><think>x</think>",
        "<think>x<answer>72</answer></think>",
        "<answer><think>x</think>72</answer>",
        "</think><think>x<answer>72</answer>",
        "<think>x</think></answer>72<answer>",
        "Sure! <think>x</think><answer>72</answer>",
        "<think>x</think> so <answer>72</answer>",
        "<think>x</think><answer>72</answer>.",
        "<think>x</think><think>y</think><answer>72</answer>",
        "<think><think>x</think><answer>72</answer>",
        "<think>x</think><answer>71</answer><answer>72</answer>",
        "<think>x</think><answer>72</answer></answer>",
        "<Think>x</Think><Answer>72</Answer>",
    ],
)
def test_what_breaks_the_format(text: str) -> None:
    assert final_answer(text) is None


_PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "7", "x"])


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_an_answer_is_found_only_where_the_whole_text_can_be_told_apart(text: str) -> None:
    answer = final_answer(text)
    if answer is not None:
        thought, _, rest = text.strip().removeprefix("<think>").partition("</think>")
        assert rest.lstrip().removeprefix("<answer>").removesuffix("</answer>").strip() == answer
        assert "<" not in thought + answer
