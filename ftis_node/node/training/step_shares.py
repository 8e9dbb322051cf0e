"""Shares of own and foreign groups in the next step, whether a step may start, and the parts of a task mixture.

A step takes I own and J foreign groups; I + J is constant. It waits for own groups without a limit, and for foreign
ones up to the run's patience (`step.foreign_wait_s`). It waits only for senders whose groups come
(`swarm/arrivals.py`), and in the first `foreign_wait_s` after the start of the node for any. A step is smaller if
foreign groups do not arrive or are refused.

If the run has `step.backfill_with_own`, the node shares the shortfall evenly with the senders of the present foreign
groups. Each of them gets the groups of all others. If there is a surplus of foreign groups, the node generates fewer
extra groups. It divides the surplus by the same number of nodes and keeps the remainder for the next steps. So peers
that send less than one group per step also count.

A learner that generates nothing takes I + J groups of any peers: the first I replace its own ones. A node that has
stopped generating first uses its remaining own groups, and then does the same. It may end in two cases: the run takes
no foreign groups, or no sender was awaited for the whole patience.

If the run has `step.task_allocation = "advantage"`, the parts of a task mixture get shares of the generation. A group
has a signal if its advantages are not all 0. The train loop counts such groups of each step, own and foreign. The
generate loop skips problems to match the shares (`algorithms/group_choice.py`). A restart resets the shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.algorithms.group_choice import SignalCount, division_shares, has_signal, keep_chances
from ftis_node.swarm.peer_guard import Place
from ftis_node.tasks import proportions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftis_node.config.manifest import RunManifest
    from ftis_node.node.context import NodeContext
    from ftis_node.node.training.group_limits import GenerateBudget, SlotPool
    from ftis_node.replay.lifecycle import Candidate
    from ftis_node.replay.reader import ReplayReader
    from ftis_node.replay.rows import StoredGroup
    from ftis_node.swarm.peer_guard import PeerGuard
    from ftis_node.telemetry.events import EventLog


class Division:
    """Shares of the parts of one node's domain. It ignores groups of other tasks."""

    def __init__(self, proportions: Mapping[str, float]) -> None:
        """`proportions` of the mixture by part, with sum 1."""
        self._proportions = dict(proportions)
        self._own = dict.fromkeys(proportions, SignalCount())
        self._peers = dict.fromkeys(proportions, SignalCount())
        self.shares = dict(proportions)
        self._chances = keep_chances(self.shares, proportions)

    def note(self, task: str, rewards: Sequence[float], *, own: bool) -> None:
        """Count a group that a step used, or that the selection of the step's groups discarded."""
        counts = self._own if own else self._peers
        if task in counts:
            counts[task] = counts[task].with_group(has_signal=has_signal(rewards))

    def end_step(self) -> dict[str, dict[str, float]]:
        """Compute the shares from the groups of a step. Return them with the signal rates of the parts."""
        self.shares = division_shares(self._proportions, self._own, self._peers)
        self._chances = keep_chances(self.shares, self._proportions)
        own, peers = ({part: count.rate for part, count in counts.items()} for counts in (self._own, self._peers))
        for counts in (self._own, self._peers):
            counts.update({part: count.faded() for part, count in counts.items()})
        return {"shares": self.shares, "own_rates": own, "peer_rates": peers}

    def keeps(self, task: str, draw: float) -> bool:
        """Return whether to generate for a problem of the part `task`; `draw` is uniform in [0, 1)."""
        return draw < self._chances[task]


def division_of(manifest: RunManifest, domain: str) -> Division | None:
    """Return the division of a node that generates for the canonical SPEC `domain`.

    Return None if the run divides tasks evenly, or the domain has only one part.
    """
    if manifest.step.task_allocation == "even" or len(by_part := proportions(domain)) == 1:
        return None
    return Division(by_part)


def note_signals(
    division: Division | None,
    step: int,
    groups: Sequence[StoredGroup],
    discarded: Sequence[Candidate],
    *,
    guard: PeerGuard,
    events: EventLog,
) -> None:
    """Count the groups of a step and the discarded candidates in `division`, and record the new shares.

    A rule may discard groups without a signal. If only used groups counted, every part would have a signal rate of 1.
    """
    if division is None:
        return
    for group in groups:
        with guard.work_for(group.sender, Place.COUNT, passes=(Exception,) if group.own else ()):
            division.note(group.prompt_ref.task, group.rewards, own=group.own)
    for candidate in discarded:
        with guard.work_for(candidate.sender, Place.COUNT, passes=(Exception,) if candidate.own else ()):
            division.note(candidate.task, candidate.rewards, own=candidate.own)
    figures = division.end_step()
    rounded = {name: {part: round(value, 4) for part, value in of.items()} for name, of in figures.items()}
    events.write("division", step=step, **rounded)


@dataclass(frozen=True, slots=True)
class StepQuota:
    """I and J of the manifest, and the patience in seconds.

    If the node generates more groups per step (`generated`) than a step takes, the step waits for all of them.
    """

    own: int
    foreign: int
    foreign_wait_s: float
    generated: int = 0

    @property
    def own_waited_for(self) -> int:
        """Return the number of own groups that must be READY before the step starts."""
        return max(self.own, self.generated)

    @classmethod
    def of(cls, manifest: RunManifest) -> StepQuota:
        step = manifest.step
        return cls(
            own=step.own_groups,
            foreign=step.foreign_groups,
            foreign_wait_s=step.foreign_wait_s,
            generated=step.generated_groups or 0,
        )


def shares_of_step(needs: StepQuota, *, generates: bool, own_left: int = 0) -> tuple[int, int]:
    """Return how many own and foreign groups a step takes, by signer.

    `own_left` is the number of READY own groups of a node that has stopped generating.
    """
    if generates:
        return needs.own, needs.foreign
    own = min(own_left, needs.own)
    return own, needs.own + needs.foreign - own


def substitute_foreign(ready: int, *, needs: StepQuota) -> tuple[int, int]:
    """Return the READY groups as (own, foreign) for a node that does not generate: the first I count as own."""
    standing_in = min(ready, needs.own)
    return standing_in, ready - standing_in


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the policy. `waited_s` is the time since all own groups were READY, `uptime_s` since the node started.

    `alone_s` is the time since a sender was last awaited, or since the start.
    """

    own_ready: int
    foreign_ready: int
    waited_s: float
    uptime_s: float
    awaits_sender: bool
    alone_s: float = 0.0


def may_start(needs: StepQuota, outlook: StepInputs) -> bool:
    if outlook.own_ready < needs.own_waited_for:
        return False
    if outlook.foreign_ready >= needs.foreign:
        return True
    if outlook.own_ready + outlook.foreign_ready == 0:
        return False
    somebody_may_come = outlook.awaits_sender or outlook.uptime_s < needs.foreign_wait_s
    return not somebody_may_come or outlook.waited_s >= needs.foreign_wait_s


def never_starts(needs: StepQuota, outlook: StepInputs) -> bool:
    """Return whether the next step of a node that has stopped generating can never start: no peer will complete it."""
    if outlook.own_ready >= needs.own and outlook.own_ready + outlook.foreign_ready > 0:
        return False
    return not needs.foreign or (not outlook.awaits_sender and outlook.alone_s >= needs.foreign_wait_s)


@dataclass(kw_only=True, eq=False, repr=False)
class StepShares:
    """Computes the shares of a step from the manifest, adjusted if the node generates nothing or its budget is used."""

    context: NodeContext
    budget: GenerateBudget
    slots: SlotPool
    reader: ReplayReader

    @property
    def makes_more(self) -> bool:
        """Return whether more own groups will be stored: budget is left, or a group is still in generation."""
        return self.context.settings.generates and not (self.budget.is_used_up and not self.slots.waiting)

    @property
    def is_learned_out(self) -> bool:
        """Return whether the budget of training tokens (`budget.learn_tokens`) is used up."""
        limit = self.context.settings.budget.learn_tokens
        return limit is not None and self.reader.trained_tokens() >= limit

    def of_next_step(self, needs: StepQuota | None = None) -> tuple[int, int]:
        """Return the own and foreign groups of the next step, by signer. `needs` defaults to the manifest's quota."""
        needs = needs or StepQuota.of(self.context.manifest)
        settings = self.context.settings
        if settings.role == "exchange":  # the trainer beside it makes the own groups
            return needs.own, needs.foreign
        generates = settings.generates
        if not generates or self.makes_more or not needs.foreign:
            return shares_of_step(needs, generates=generates)
        own_left, _ = self.reader.ready_counts()
        return shares_of_step(needs, generates=False, own_left=own_left)


@dataclass(slots=True)
class ForeignShortfall:
    """Controller of `extra`: the own groups beyond I in the next step, which replace foreign ones; 0 at the start."""

    extra: int = 0
    _left: int = 0
    _plenty: int = 0  # surplus of earlier steps that has not reduced `extra` yet

    def shares(self, own: int, foreign: int) -> tuple[int, int]:
        """Return I and J for the next step."""
        extra = min(self.extra, foreign)
        return own + extra, foreign - extra

    def note(self, num_foreign: int, senders: Sequence[str]) -> None:
        """Note the start of a step of up to `num_foreign` foreign groups. `senders` has an entry per READY group.

        Groups left from the last step are no surplus, because the buffer's stock shrinks: only new arrivals count.
        """
        ready, sharers = len(senders), 1 + len(set(senders))
        missing, plenty = num_foreign - ready, ready - self._left - num_foreign
        self._left = max(0, -missing)
        if missing > 0:
            self.extra += -(-missing // sharers)
            self._plenty = 0
        elif plenty > 0:
            less, self._plenty = divmod(self._plenty + plenty, sharers)
            self.extra = max(0, self.extra - less)
