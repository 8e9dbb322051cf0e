"""Rounds: all nodes of an experiment take their n-th step together, on the same groups however fast each one is.

A round is complete when every node has made its groups of this step and every one of them was judged by every other
node, taken or refused. So no clock is needed: a refused group is not waited for, and nobody trains on half a round.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from ftis_node.swarm.reasons import AFTER_THE_DOOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.node.figures import Figures

POLL_S = 0.004


class Participant(Protocol):
    """One who sends groups into the swarm."""

    @property
    def peer_id(self) -> str: ...
    @property
    def groups_sent(self) -> int: ...


class Lockstep:
    """The rounds of one swarm. Every participant sends `groups_per_step` groups a round."""

    def __init__(self, *, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._senders: list[Participant] = []
        self._judges: dict[str, Figures] = {}

    def enter(self, sender: Participant, figures: Figures | None = None) -> None:
        """Counts on this sender; with `figures`, as a node that judges what others send."""
        self._senders.append(sender)
        if figures is not None:
            self._judges[sender.peer_id] = figures

    async def wait(self, step: int) -> None:
        """Returns when the round of step `step` is complete. A `node.gate.StepGate`."""
        await _until(lambda: self._is_complete(step))

    async def begin(self, step: int) -> None:
        """Returns when every node has done the step before: for those who send without training."""
        await _until(lambda: all(figures.step >= step - 1 for figures in self._judges.values()))

    def _is_complete(self, step: int) -> bool:
        due = step * self._groups_per_step
        if any(sender.groups_sent < due for sender in self._senders):
            return False
        return all(self._num_judged(figures) >= due * (len(self._senders) - 1) for figures in self._judges.values())

    @staticmethod
    def _num_judged(figures: Figures) -> int:
        judged = 0
        for peer in figures.peers.values():
            refused_later = sum(peer.refused[reason] for reason in AFTER_THE_DOOR)  # counted as accepted before
            judged += peer.accepted + peer.refused.total() - refused_later
        return judged


async def _until(holds: Callable[[], bool]) -> None:
    """What is waited for changes in many places, so it is looked at now and then; the swarm has work meanwhile."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
