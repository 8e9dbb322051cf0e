"""Versions of weights under way to one generator: which has arrived, and which is worth sending at all.

Versions may overtake each other; a generator takes the newest that has arrived and never goes back. Time is a number in
the delay's unit: seconds by a node's clock, or optimiser steps in an experiment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from ftis_node.config.delay import Delay


@dataclass(slots=True)
class VersionsInTransit:
    """What is under way, with the delay of each drawn when it is sent."""

    delay: Delay
    source: random.Random
    served: int = 0
    _arrivals: dict[int, float] = field(default_factory=dict)

    @property
    def versions(self) -> Sequence[int]:
        """Versions under way, oldest first."""
        return sorted(self._arrivals)

    def send(self, version: int, *, at: float) -> None:
        """A version leaves the learner."""
        self._arrivals[version] = at + self.delay.draw(self.source)

    def receive(self, now: float) -> int | None:
        """The version to serve from now on; None where nothing newer has arrived. What it overtakes is forgotten."""
        arrived = [version for version, at in self._arrivals.items() if at <= now and version > self.served]
        if not arrived:
            return None
        self.served = max(arrived)
        self._arrivals = {version: at for version, at in self._arrivals.items() if version > self.served}
        return self.served


def should_fetch(delay: Delay, *, num_held: int, max_held: int, since_last: float) -> bool:
    """Whether a generator that can hold `max_held` versions under way should fetch one more.

    The newest before it was made `since_last` ago. Were each new version fetched, a long delay would fill the places
    with versions made at nearly one time, and leave a gap of the whole delay behind them; so they are spread over it.
    """
    return num_held < max_held and since_last >= delay.most / max_held


def outdated_offers(
    asked_at: dict[int, float], *, now: float, max_offered: int, num_newest: int = 2, lease: float = 60.0
) -> list[int]:
    """Versions that a learner need not keep for generators any longer.

    The `num_newest` newest stay, and older ones while somebody fetches them (asked for within `lease`), but never more
    than `max_offered`. `asked_at` says of each kept version when it was last asked for.
    """
    versions = sorted(asked_at, reverse=True)
    older = versions[num_newest:]
    wanted = [version for version in older if now - asked_at[version] <= lease][: max_offered - num_newest]
    return [version for version in older if version not in wanted]
