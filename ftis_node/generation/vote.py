"""Majority over answers: each model says one thing, and what most of them say is the ensemble's answer.

The rule, in this order, over votes in the order in which the models were named:

1. An answer has as many votes as completions that gave it. A completion without an answer (a broken format, a prompt
   that is too long for its model) does not vote.
2. Of answers with equally many votes the one whose votes have the higher sum of mean log-probs (nats a token, each
   model by its own measure): the models that are surer of themselves decide.
3. Of those that are equal in this too, the one that was given first, so the first model's before the second's.

Where nobody has an answer, the first completion stands for the ensemble, as it would alone. Nothing here knows which
answer is right.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

UNSURE = -1e6  # nats: what a log-prob that is no number counts as


@dataclass(frozen=True, slots=True)
class Vote:
    """What one completion says, `answer` None: nothing; `mean_logprob` in nats a token."""

    answer: str | None
    mean_logprob: float


def elect(votes: Sequence[Vote]) -> int | None:
    """The position of the first vote for the answer that wins; 0 where nobody has one; None where nobody votes."""
    by_answer: dict[str, list[int]] = defaultdict(list)
    for position, vote in enumerate(votes):
        if vote.answer is not None:
            by_answer[vote.answer].append(position)
    if not by_answer:
        return 0 if votes else None
    # max() keeps the first of equals, and answers stand in the order in which they were first given
    return max(by_answer.values(), key=lambda positions: (len(positions), sum(_sureness(votes[p]) for p in positions)))[
        0
    ]


def _sureness(vote: Vote) -> float:
    return vote.mean_logprob if isfinite(vote.mean_logprob) else UNSURE
