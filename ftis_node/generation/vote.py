"""A majority vote over answers: each model gives one, and the most frequent is the ensemble's answer.

The rule, in this order, over votes in the order in which the models were named:

1. An answer's votes are the completions that gave it. A completion without an answer (a broken format, a prompt
   that is too long for its model) does not vote.
2. Among equals, the answer whose votes have the higher sum of mean log-probs wins (nats a token, each under its own
   model). So the more confident models decide.
3. If these are equal too, the answer that was given first wins, so the first model's before the second's.

If no completion has an answer, the first completion is the ensemble's. The vote does not use the correct answer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

UNSURE = -1e6  # nats: replaces a log-prob that is not finite


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one completion; `answer` None: it has none; `mean_logprob` is in nats a token."""

    answer: str | None
    mean_logprob: float


def elect(votes: Sequence[Vote]) -> int | None:
    """Return the position of the first vote for the winning answer; 0 if no vote has one, None without votes."""
    by_answer: dict[str, list[int]] = defaultdict(list)
    for position, vote in enumerate(votes):
        if vote.answer is not None:
            by_answer[vote.answer].append(position)
    if not by_answer:
        return 0 if votes else None
    # max() returns the first of equals, and answers are in order of their first vote
    return max(by_answer.values(), key=lambda positions: (len(positions), sum(_sureness(votes[p]) for p in positions)))[
        0
    ]


def _sureness(vote: Vote) -> float:
    return vote.mean_logprob if isfinite(vote.mean_logprob) else UNSURE
