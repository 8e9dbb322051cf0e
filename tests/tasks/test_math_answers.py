"""Mathematical answers: equal and unequal ones, a costly one in the scoring process, and the think-answer format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.records.group import CompletionStatus
from ftis_node.tasks import load_task
from ftis_node.tasks.answers import answers_agree, final_answer
from ftis_node.tasks.scorer import IsolatedScorer, ScoringLimits
from ftis_node.tasks.scoring_worker import ScoringCost

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.tasks import Task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "How many clips?", "answer": "48 + 24\n#### 72"}) + "\n")
    return load_task(f"gsm8k:{file}")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>48+24</think><answer>72</answer>", 1.0),
        ("<think>48+24</think>\n<answer>\\boxed{72}</answer>\n", 1.0),
        ("<think>72</think><answer>71</answer>", 0.0),
        ("<think>72</think><answer></answer>", 0.0),
        ("72", 0.0),
        ("<think>x</think>72", 0.0),
        ("\ud800 \x00", 0.0),
        ("<think>x</think><answer>\ud800 \x00</answer>", 0.0),
    ],
)
def test_the_reward_needs_format_and_answer(task: Task, completion: str, reward: float) -> None:
    assert task.score(task[0], completion) == reward


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("72", "72"),
        ("72", "72.00"),
        ("72", "$72"),
        ("72", "\\$72"),
        ("72", "72 clips"),
        ("72", "**72**"),
        ("72", "The answer is 72."),
        ("72", "The answer is $72$."),
        ("72", "48 + 24 = 72"),
        ("72", "\\( 72 \\)"),
        ("1080", "1,080"),
        ("1080", "1{,}080"),
        ("1080", "1\\,080"),
        ("\\frac{3}{4}", "3/4"),
        ("\\frac{3}{4}", "0.75"),
        ("\\frac{1}{3}", "0.333333"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
        ("\\text{Evelyn}", "Evelyn"),
        ("11\\sqrt2", "11*sqrt(2)"),
        ("6 - 5i", "-5i + 6"),
        ("2,3", "3 and 2"),
        ("x^2 + 2x + 1", "(x+1)^2"),
        ("5", "x = 5"),
        ("90^\\circ", "90"),
        ("?!", "?!"),  # a text that the library cannot parse equals itself
    ],
)
def test_equal_answers_agree(reference: str, answer: str) -> None:
    assert answers_agree(reference, answer)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("72", "71"),
        ("72", "-72"),
        ("72", "72000"),
        ("72", "about a dozen"),
        ("2", "\\left( 3, \\frac{\\pi}{2} \\right)"),  # the last number alone is no answer
        ("\\text{Evelyn}", "Carla"),
        ("x^2 + 1", "x^2 - 1"),
        ("[1,2]", "(1,2)"),
        ("72", "{" * 100),
        ("72", "72" + " " * 500 + "."),
    ],
)
def test_unequal_answers_do_not_agree(reference: str, answer: str) -> None:
    assert not answers_agree(reference, answer)


def test_an_answer_on_which_the_parser_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("math_verify.verify", fail)
    assert not answers_agree("72", "72.0")


async def test_a_costly_answer_is_scored_at_once_and_does_not_affect_others(task: Task) -> None:
    right = "<think>x</think><answer>72</answer>"
    costly = "<think>x</think><answer>((((9^{99})^{99})^{99})^{99})</answer>"
    cost = ScoringCost()
    async with IsolatedScorer(task, limits=ScoringLimits(time_limit_s=3)) as scorer:
        await scorer.score(task[0], [right])  # starts the process
        scores = await scorer.score(task[0], [right, costly, right], cost=cost)
    assert scores == [(reward, CompletionStatus.SCORED) for reward in (1.0, 0.0, 1.0)]
    assert cost.num_stopped == 0
    assert cost.seconds < 3.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>x</think><answer>72</answer>", "72"),
        ("<think>\nx\n</think>\n<answer>\n72\n</answer>\n", "72"),
        ("  <think></think>\t<answer> a\nb </answer>", "a\nb"),
        ("<think>is a < b?</think><answer></answer>", ""),
    ],
)
def test_the_answer_of_a_text_in_the_format(text: str, answer: str) -> None:
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
def test_a_text_outside_the_format_has_no_answer(text: str) -> None:
    assert final_answer(text) is None


_PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "7", "x"])


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_an_answer_is_found_only_if_the_whole_text_can_be_parsed(text: str) -> None:
    answer = final_answer(text)
    if answer is not None:
        thought, _, rest = text.strip().removeprefix("<think>").partition("</think>")
        assert rest.lstrip().removeprefix("<answer>").removesuffix("</answer>").strip() == answer
        assert "<" not in thought + answer
