"""Synchronous rounds: all nodes of an experiment take their n-th step together on the same groups, at any speed.

A round is complete when every node has generated its groups of this step and every other node has validated each of
them. So the nodes need no clock, do not wait for rejected groups, and never train on half a round. A node that has
finished its last step leaves: it generates and validates nothing more, and the others continue.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftis_node.lab.experiment.rounds import RoundQuota
from ftis_node.node.training.step_shares import ForeignShortfall
from ftis_node.swarm.reasons import AFTER_VALIDATION

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.config.manifest import RunManifest
    from ftis_node.lab.experiment.rounds import Rounds
    from ftis_node.node.context import NodeState
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.node.training.group_limits import SlotPool

POLL_S = 0.004


class Participant(Protocol):
    """A node that sends groups."""

    @property
    def peer_id(self) -> str: ...
    @property
    def groups_sent(self) -> int: ...


class ReadyGroups(Protocol):
    """A buffer that lists its ready foreign groups."""

    def ready_foreign(self) -> list[tuple[str, int]]: ...


class Validator(NamedTuple):
    """A node that validates the others' groups: its state, and its counts of validated groups by peer."""

    state: NodeState
    registry: PeerRegistry


class Enrollment(NamedTuple):
    """A sender in the rounds up to `last_step`. If it has a `validator`, it also validates the others' groups."""

    sender: Participant
    last_step: int
    quota: RoundQuota
    validator: Validator | None

    def due(self, step: int) -> int:
        """Return the number of groups that it has generated when this step's round is complete."""
        return self.quota.due(min(step, self.last_step))


class SynchronousRounds:
    """Barrier for the rounds of one swarm."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self._enrolled: list[Enrollment] = []
        self._begun: dict[str, int] = {}  # by peer id: the step that it waits for; it has finished all earlier ones

    def enter(
        self,
        sender: Participant,
        validator: Validator | None = None,
        *,
        last_step: int,
        quota: RoundQuota | None = None,
    ) -> None:
        """Add a sender that takes part up to `last_step`; with `validator`, it also validates the others' groups."""
        self._enrolled.append(Enrollment(sender, last_step, quota or RoundQuota(self.rounds), validator))

    def due(self, peer_id: str, step: int) -> int:
        """Return the number of groups that this sender has generated when the round of `step` is complete."""
        return next(place.due(step) for place in self._enrolled if place.sender.peer_id == peer_id)

    async def wait(self, step: int) -> None:
        """Wait until the round of `step` is complete."""
        await _until(lambda: self._is_complete(step))

    def arrive(self, peer_id: str, step: int) -> None:
        """Record that this node has finished all steps before `step`, including their effects on reputations."""
        self._begun[peer_id] = step

    async def begin(self, step: int) -> None:
        """Wait until every node has finished the previous step, or its last one.

        A node writes a step's metrics before its bans. If a peer announced a group between them, the group would be
        neither accepted nor rejected.
        """
        validators = [place for place in self._enrolled if place.validator]
        await _until(lambda: all(self._has_done(place, min(step - 1, place.last_step)) for place in validators))

    def _has_done(self, place: Enrollment, step: int) -> bool:
        if self._begun.get(place.sender.peer_id, 1) > step:
            return True
        return step == place.last_step and place.validator is not None and place.validator.state.step >= step

    def _is_complete(self, step: int) -> bool:
        if not all(place.quota.is_known(min(step, place.last_step)) for place in self._enrolled):
            return False
        due = [place.due(step) for place in self._enrolled]
        if any(place.sender.groups_sent < number for place, number in zip(self._enrolled, due, strict=True)):
            return False
        return all(
            _num_validated(place.validator.registry) >= sum(due) - number
            for place, number in zip(self._enrolled, due, strict=True)
            if place.validator is not None and place.last_step >= step
        )


class RoundGate:
    """A member's `node.gate.StepGate`: synchronous with the others, with no more groups than its rounds take.

    If the run has `step.backfill_with_own`, the member compensates for rejected groups, and `quota` has its number of
    groups in each round.
    """

    def __init__(
        self,
        lockstep: SynchronousRounds,
        *,
        peer_id: str,
        manifest: RunManifest,
        slots: SlotPool,
        ready: ReadyGroups,
        quota: RoundQuota | None = None,
    ) -> None:
        self._lockstep = lockstep
        self._peer_id = peer_id
        self._step_settings = manifest.step
        self._slots = slots
        self._ready = ready
        self._quota = quota or RoundQuota(lockstep.rounds)
        self._fill = ForeignShortfall()
        self._slots.capacity = self._own_groups(1)

    async def wait(self, step: int) -> bool:
        """Return True when the round is complete.

        The round's groups are generated only after every node has finished the previous step. Otherwise a node that
        takes that step late would count them in its own round.
        """
        self._lockstep.arrive(self._peer_id, step)
        await self._lockstep.begin(step)
        self._slots.resize(self._own_groups(step))
        await self._lockstep.wait(step)
        if self._step_settings.backfill_with_own:
            self._plan(step)
        self._slots.resize(0)
        return True

    def shares(self, step: int) -> tuple[int, int]:
        """Return the round's own and remote groups that the step takes."""
        own, foreign = self._quota.shares(step)
        drawn = self._step_settings
        return (own, foreign) if drawn.generated_groups is None else (min(own, drawn.own_groups), foreign)

    def _own_groups(self, step: int) -> int:
        return self._quota.shares(step)[0]

    def _plan(self, step: int) -> None:
        """Generate in the next round the groups that are missing in this one.

        Groups of the next round that arrived early do not count.
        """
        ready = self._ready.ready_foreign()
        senders = [sender for sender, number in ready if number <= self._lockstep.due(sender, step)]
        self._fill.note(self.shares(step)[1], senders)
        own, _ = self._fill.shares(*self._lockstep.rounds.shares(step + 1))
        self._quota.plan(step + 1, own)


def _num_validated(registry: PeerRegistry) -> int:
    judged = 0
    for peer in registry.peers.values():
        refused_later = sum(peer.refused[reason] for reason in AFTER_VALIDATION)  # counted as accepted before
        judged += peer.accepted + peer.refused.total() - refused_later
    return judged


async def _until(holds: Callable[[], bool]) -> None:
    """Poll until the condition holds. It depends on many parts of the swarm, which run meanwhile."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
