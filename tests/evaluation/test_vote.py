"""The majority vote and its tie rule, on votes written by hand."""

import math

import pytest

from ftis_node.evaluation.result import elect

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
