"""Whose groups a node of a domain pulls first: those of its own domain, or those of others.

The run's `step.own_domain_share` is what it would like of the groups that wait for its learner. A sender's domain is a
claim, so it only orders pulls: what one side has not got the other fills, and no step starves for it. Of a group that
is here the task is certain, and by that a step chooses (`algorithms/group_choice.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Portion(NamedTuple):
    """Some of what is announced: `num` groups of own domain (`near`), of others, or (None) of any; `num` None: all."""

    num: int | None
    near: bool | None


ANY = Portion(num=None, near=None)


@dataclass(frozen=True, slots=True)
class OwnDomain:
    """The tasks of a node's domain, and the share of others' groups that is to be from it."""

    tasks: frozenset[str]
    share: float

    def is_claimed(self, parts: frozenset[str]) -> bool:
        """Whether a peer that generates for `parts` makes groups of this domain alone; none: for the whole task."""
        return bool(parts) and parts <= self.tasks


def portions(share: float, *, stock: int, need: int | None, num_near: int, num_far: int) -> tuple[Portion, ...]:
    """In which order to pull for a stock of `stock` groups; `num_near` and `num_far` are here or on their way.

    `need`: how many are to be pulled in all; None: everything. Each side is pulled up to its part of the stock even
    where the other has filled it, for the other is only a stand-in; so at most twice the stock waits. The last portion
    is always of any side, and bounded by `need` alone.
    """
    want_near = round(share * stock)
    lack_near, lack_far = max(0, want_near - num_near), max(0, stock - want_near - num_far)
    if need is None:  # all of it, and first the side that is further behind its share
        return Portion(None, near=num_near <= share * (num_near + num_far)), ANY
    sides = Portion(lack_near, near=True), Portion(lack_far, near=False)
    return (*(sides if share >= 0.5 else sides[::-1]), ANY)
