"""The majority and its tie rule, by votes made by hand."""

from __future__ import annotations

import math

import pytest

from ftis_node.evaluation.result import elect

TABLE = {
    "the most votes win, however unsure": ([("7", -0.1), ("8", -9.0), ("8", -9.0)], 1),
    "the winner is the first who said it": ([("9", 0.0), ("8", -1.0), ("7", 0.0), ("8", -0.5)], 1),
    "two against two: the higher sum of mean log-probs": (
        # 7: -0.6 - 0.6 = -1.2; 8: -0.2 - 1.1 = -1.3, although its first vote is the surest of all
        [("8", -0.2), ("7", -0.6), ("8", -1.1), ("7", -0.6)],
        1,
    ),
    "one against one: the surer": ([("7", -0.8), ("8", -0.7)], 1),
    "equal in all: the model that was named first": ([("7", -0.5), ("8", -0.5)], 0),
    "three alike in count and sureness: the first": ([("c", -0.5), ("a", -0.5), ("b", -0.5)], 0),
    "who has no answer does not vote": ([(None, -0.1), (None, -0.1), ("8", -5.0)], 2),
    "nobody has an answer: the first stands": ([(None, -3.0), (None, -0.1)], 0),
    "nobody votes": ([], None),
    "a log-prob that is no number is the least sure": ([("7", math.nan), ("8", -50.0)], 1),
    "as is minus infinity": ([("7", -math.inf), ("8", -50.0)], 1),
    "one model alone": ([("7", -0.5)], 0),
}


@pytest.mark.parametrize(("votes", "winner"), TABLE.values(), ids=TABLE.keys())
def test_who_is_elected(votes: list[tuple[str | None, float]], winner: int | None) -> None:
    assert elect(votes) == winner
