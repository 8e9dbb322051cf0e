"""Selection of a step's groups by the run's rule: takes some READY groups, and releases those that it discards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ftis_node.algorithms import pass_rates
from ftis_node.node.training.step_shares import note_signals
from ftis_node.replay.lifecycle import ReleaseReason, choose_newest, choose_same_prompts, choose_sapo, choose_useful

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.node.context import NodeContext
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.supervision.background import DiskThread
    from ftis_node.node.training.step_shares import Division
    from ftis_node.replay.buffer import ReplayBuffer, StoredGroup
    from ftis_node.replay.lifecycle import ChoiceRule
    from ftis_node.replay.reader import ReplayReader
    from ftis_node.swarm.demand import OwnDomain
    from ftis_node.swarm.peer_guard import PeerGuard
    from ftis_node.telemetry.events import EventLog


@dataclass(kw_only=True, eq=False, repr=False)
class StepSelection:
    """Selects the groups of a step from the buffer: READY -> TAKEN, or RELEASED if the rule discards them."""

    context: NodeContext
    buffer: ReplayBuffer
    reader: ReplayReader
    disk: DiskThread
    peers: PeerManager
    guard: PeerGuard
    division: Division | None
    own_domain: OwnDomain | None

    async def take(self, step: int, *, own: int, foreign: int) -> list[StoredGroup]:
        """Take up to `own` and `foreign` groups, by signer, for a step."""
        events, rule = self.context.events, self._rule(step)
        groups, discarded = await self.disk(self.buffer.take, step, own=own, foreign=foreign, rule=rule)
        write_taken(events, groups, step=step)
        for passed_over in discarded:
            events.write("released", group=passed_over.id, reason=ReleaseReason.DISCARDED)
        note_signals(self.division, step, groups, discarded, guard=self.guard, events=events)
        return groups

    def _rule(self, step: int) -> ChoiceRule:
        section, domain = self.context.manifest.step, self.own_domain
        if section.group_selection == "sapo":
            return partial(choose_sapo, seed=step, domain=domain)
        neighbor = self.peers.share_cap().neighbor
        if section.prompt_sharing == "horizontal":
            return partial(choose_same_prompts, neighbor=neighbor)
        if section.group_selection == "useful":
            rates = pass_rates(self.reader.own_rewards())
            return partial(choose_useful, pass_rates=rates, neighbor=neighbor, domain=domain, turn=step)
        return partial(choose_newest, neighbor=neighbor, domain=domain, turn=step)


def write_taken(events: EventLog, groups: Sequence[StoredGroup], *, step: int) -> None:
    """Write one event per group, with its origin, in case the buffer or the event of its admission gets damaged."""
    for group in groups:
        events.write("taken", group=group.id, step=step, sender=group.sender, number=group.number)
