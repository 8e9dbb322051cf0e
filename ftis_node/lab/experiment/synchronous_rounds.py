"""Rounds: all nodes of an experiment take their n-th step together, on the same groups however fast each one is.

A round is complete when every node has made its groups of this step and every one of them was judged by every other
node, taken or refused. So no clock is needed: a refused group is not waited for, and nobody trains on half a round.
A node whose last step is done leaves: it makes nothing more and judges nothing more, and the others go on without it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftis_node.lab.experiment.rounds import Quota
from ftis_node.node.training.foreign_shortfall import Fill
from ftis_node.swarm.reputation.reasons import AFTER_VALIDATION

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.lab.experiment.rounds import Rounds
    from ftis_node.node.context import Parts
    from ftis_node.node.state import Figures

POLL_S = 0.004


class Participant(Protocol):
    """One who sends groups into the swarm."""

    @property
    def peer_id(self) -> str: ...
    @property
    def groups_sent(self) -> int: ...


class Enrollment(NamedTuple):
    """A sender in the rounds up to `last_step`; with `figures`, one that judges what others send."""

    sender: Participant
    last_step: int
    quota: Quota
    figures: Figures | None

    def due(self, step: int) -> int:
        """Groups that it has made when this step's round is complete."""
        return self.quota.due(min(step, self.last_step))


class Lockstep:
    """The rounds of one swarm."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self._places: list[Enrollment] = []
        self._begun: dict[str, int] = {}  # by peer id: the step that a judge waits for, so all before it is done

    def enter(
        self, sender: Participant, figures: Figures | None = None, *, last_step: int, quota: Quota | None = None
    ) -> None:
        """Counts on this sender up to `last_step`; with `figures`, as a node that judges what others send."""
        self._places.append(Enrollment(sender, last_step, quota or Quota(self.rounds), figures))

    def due(self, peer_id: str, step: int) -> int:
        """Groups that this sender has made when the round of `step` is complete."""
        return next(place.due(step) for place in self._places if place.sender.peer_id == peer_id)

    async def wait(self, step: int) -> None:
        """Returns when the round of step `step` is complete."""
        await _until(lambda: self._is_complete(step))

    def arrive(self, peer_id: str, step: int) -> None:
        """This judge is done with all before `step`, what follows from it for its peers too."""
        self._begun[peer_id] = step

    async def begin(self, step: int) -> None:
        """Returns when every node has done the step before, or its last one.

        A step's figures come before its bans: a group announced between them would be neither taken nor refused.
        """
        judges = [place for place in self._places if place.figures]
        await _until(lambda: all(self._has_done(place, min(step - 1, place.last_step)) for place in judges))

    def _has_done(self, place: Enrollment, step: int) -> bool:
        if self._begun.get(place.sender.peer_id, 1) > step:
            return True
        return step == place.last_step and place.figures is not None and place.figures.step >= step

    def _is_complete(self, step: int) -> bool:
        if not all(place.quota.is_known(min(step, place.last_step)) for place in self._places):
            return False
        due = [place.due(step) for place in self._places]
        if any(place.sender.groups_sent < number for place, number in zip(self._places, due, strict=True)):
            return False
        return all(
            _num_judged(place.figures) >= sum(due) - number
            for place, number in zip(self._places, due, strict=True)
            if place.figures is not None and place.last_step >= step
        )


class RoundGate:
    """One member's `node.gate.StepGate`: it steps with the others, and makes no more groups than its rounds take.

    Where the run has `step.fill` it makes up for what the door refused: `quota` says what it makes of each round.
    """

    def __init__(self, lockstep: Lockstep, parts: Parts, *, quota: Quota | None = None) -> None:
        self._lockstep = lockstep
        self._parts = parts
        self._quota = quota or Quota(lockstep.rounds)
        self._fill = Fill()
        self._parts.slots.capacity = self._made(1)

    async def wait(self, step: int) -> bool:
        """Returns True when the round is complete. Its groups are made once everybody has done the step before: whoever
        takes that step late would find them among those of its own round."""
        self._lockstep.arrive(self._parts.identity.peer_id, step)
        await self._lockstep.begin(step)
        self._parts.slots.resize(self._made(step))
        await self._lockstep.wait(step)
        if self._parts.manifest.step.fill:
            self._plan(step)
        self._parts.slots.resize(0)
        return True

    def shares(self, step: int) -> tuple[int, int]:
        """The round's own and foreign groups that the step takes."""
        own, foreign = self._quota.shares(step)
        drawn = self._parts.manifest.step
        return (own, foreign) if drawn.generated_groups is None else (min(own, drawn.own_groups), foreign)

    def _made(self, step: int) -> int:
        """Own groups that are made for the round."""
        return self._quota.shares(step)[0]

    def _plan(self, step: int) -> None:
        """What is missing of this round is made in the next. Groups of the next that are here already do not count."""
        ready = self._parts.reader.ready_foreign()
        senders = [sender for sender, number in ready if number <= self._lockstep.due(sender, step)]
        self._fill.note(self.shares(step)[1], senders)
        own, _ = self._fill.shares(*self._lockstep.rounds.shares(step + 1))
        self._quota.plan(step + 1, own)


def _num_judged(figures: Figures) -> int:
    judged = 0
    for peer in figures.peers.values():
        refused_later = sum(peer.refused[reason] for reason in AFTER_VALIDATION)  # counted as accepted before
        judged += peer.accepted + peer.refused.total() - refused_later
    return judged


async def _until(holds: Callable[[], bool]) -> None:
    """What is waited for changes in many places, so it is looked at now and then; the swarm has work meanwhile."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
