"""The groups of a step: chosen by the run's rule, taken from the buffer, and built as the learner reads them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ftis_node.config.method_table import CHOICES
from ftis_node.config.step import Share
from ftis_node.learner.messages import TrainGroup
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.replay.buffer import Taken
from ftis_node.replay.group_choice import ChoiceRule, choose_newest, choose_same_prompts, choose_sapo, load_choice
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.telemetry.events import EventLog


@dataclass(frozen=True, slots=True)
class TrainGroupBuilder:
    """Builds the groups that the learner trains on. `end_ids` and `observation_form` are those of this node's model.

    With `share` "vertical", advantages compare the completions of one group. With "horizontal", they compare all
    completions of a prompt, over all generators.
    """

    share: Share
    end_ids: tuple[int, ...] = ()
    observation_form: tuple[int, ...] = ()

    def build(self, group: StoredGroup, *, of_own_weights: bool = False, weight: float = 1.0) -> TrainGroup:
        """Return a stored group as the learner reads it. For `of_own_weights` see `PeerManager.is_of_own_weights`."""
        return TrainGroup(
            group_id=group.id.hex(),
            advantage_key=group.id.hex() if self.share == "vertical" else group.problem.hex(),
            own=group.own,
            body=group.body,
            prompt_ids=group.prompt_ids,
            rewards=group.rewards,
            text_token_ids=group.text_token_ids,
            observation_ids=group.observation_ids,
            of_own_weights=of_own_weights,
            sender=group.sender,
            weight=weight,
            end_ids=self.end_ids,
            observation_form=self.observation_form,
            task=group.prompt_ref.task,
        )


async def take_groups(
    node: NodePart, step: int, *, own: int, foreign: int, disk: Callable[..., Awaitable[Taken]]
) -> list[StoredGroup]:
    """Take up to `own` and `foreign` groups, by signer: READY -> TAKEN, or RELEASED if the rule discards them.

    `disk` runs the write: the store's disk thread, or its `once` for a caller that does not wait for a full disk.
    """
    events, rule = node.context.events, _rule(node.context, node.peers, step)
    groups, discarded = await disk(node.store.buffer.take, step, own=own, foreign=foreign, rule=rule)
    write_taken(events, groups, step=step)
    for unused in discarded:
        events.write("released", group=unused.id, reason=ReleaseReason.DISCARDED)
    return groups


def _rule(context: NodeContext, peers: PeerManager, step: int) -> ChoiceRule:
    section = context.manifest.step
    if section.group_selection == "sapo":
        return partial(choose_sapo, seed=step)
    if section.group_selection not in CHOICES:
        return partial(load_choice(section.group_selection), step=step)
    neighbor = peers.share_cap().neighbor
    if section.prompt_sharing == "horizontal":
        return partial(choose_same_prompts, neighbor=neighbor)
    return partial(choose_newest, neighbor=neighbor)


def write_taken(events: EventLog, groups: Sequence[StoredGroup], *, step: int) -> None:
    """Write one event per group, with its origin, in case the buffer or the event of its admission gets damaged."""
    for group in groups:
        events.write("taken", group=group.id, step=step, sender=group.sender, number=group.number)
