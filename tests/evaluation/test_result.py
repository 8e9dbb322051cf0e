"""Results and costs of votes and confidence, on answers and votes written by hand."""

import math

import pytest

from ftis_node.evaluation.ensemble import confidence_row, elect, elected, evaluation_row, selection_row
from ftis_node.generation.evaluate import Answered, ScoredAnswer
from ftis_node.records.group import CompletionStatus, FinishReason
from ftis_node.tasks import load_task

TASK = load_task("arithmetic", split="test")
RIGHT = [TASK[index].answer for index in range(3)]


def scored(index: int, text: str, logprob: float) -> ScoredAnswer:
    reward = TASK.score(TASK[index], text)
    return ScoredAnswer(text, 2, logprob, FinishReason.STOP, reward, CompletionStatus.SCORED)


def model(*answers: tuple[str, float] | None) -> list[Answered]:
    """Return a model's greedy answers to the first problems, with mean log-probs. None: the prompt was too long."""
    return [
        Answered(TASK[index], 10, None if answer is None else scored(index, *answer))
        for index, answer in enumerate(answers)
    ]


def test_the_majority_wins_and_a_tie_goes_to_the_more_confident():
    # problem 0: two right votes against one; 1: a tie, the more confident is wrong; 2: too long for all
    first = model((RIGHT[0], -2.0), ("00", -0.1), None)
    second = model((f" {RIGHT[0]}\n", -2.0), (RIGHT[1], -0.2), None)
    third = model(("00", -0.1), None, None)
    by_model = [first, second, third]
    entry = selection_row("vote", elected(by_model, TASK), by_model)
    assert entry.result.pass_at_1 == pytest.approx(1 / 3)
    assert (entry.result.n, entry.result.too_long, entry.result.pass_at_k) == (3, 1, None)
    assert (entry.generated_tokens, entry.forward_tokens) == (2 * 5, (10 + 2) * 5)


def test_confidence_takes_the_answer_of_the_most_confident_model():
    # problem 0: the second is more confident; 1: equal, so the first; 2: too long for the first, NaN for the second
    first, second = model(("00", -0.6), ("00", -0.5), None), model((RIGHT[0], -0.5), (RIGHT[1], -0.5), ("00", math.nan))
    entry = confidence_row([first, second], names=["a", "b"])
    assert entry.result.pass_at_1 == pytest.approx(1 / 3)
    assert (entry.chosen, entry.result.too_long) == ({"a": 2, "b": 1}, 1)
    assert (entry.generated_tokens, entry.forward_tokens) == (5 * 2, 5 * (10 + 2))


def test_a_mixture_needs_a_forward_pass_of_every_model_for_each_token():
    answered = model((RIGHT[0], -0.5), ("00", -0.5))
    alone, mixed = evaluation_row("a", answered), evaluation_row("mean", answered, num_models=3)
    assert alone.result == mixed.result
    assert alone.generated_tokens == mixed.generated_tokens == 4
    assert (alone.forward_tokens, mixed.forward_tokens) == (24, 72)


TABLE = {
    "the majority wins in spite of low log-probs": ([("7", -0.1), ("8", -9.0), ("8", -9.0)], 1),
    "the winner is the first vote for the elected answer": ([("9", 0.0), ("8", -1.0), ("7", 0.0), ("8", -0.5)], 1),
    "two against two: the higher sum of mean log-probs": (
        # 7: -0.6 - 0.6 = -1.2; 8: -0.2 - 1.1 = -1.3, although its first vote has the highest log-prob
        [("8", -0.2), ("7", -0.6), ("8", -1.1), ("7", -0.6)],
        1,
    ),
    "one against one: the higher log-prob": ([("7", -0.8), ("8", -0.7)], 1),
    "equal in both: the first model": ([("7", -0.5), ("8", -0.5)], 0),
    "three of equal count and log-prob: the first": ([("c", -0.5), ("a", -0.5), ("b", -0.5)], 0),
    "a model without an answer does not vote": ([(None, -0.1), (None, -0.1), ("8", -5.0)], 2),
    "no model has an answer: the first": ([(None, -3.0), (None, -0.1)], 0),
    "no votes": ([], None),
    "a log-prob of NaN is the lowest": ([("7", math.nan), ("8", -50.0)], 1),
    "a log-prob of minus infinity is the lowest": ([("7", -math.inf), ("8", -50.0)], 1),
    "one model": ([("7", -0.5)], 0),
}


@pytest.mark.parametrize(("votes", "winner"), TABLE.values(), ids=TABLE.keys())
def test_the_elected_vote(votes, winner):
    assert elect(votes) == winner
