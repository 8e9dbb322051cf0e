"""The mismatch loop: compares the engine's log-probs with those of the learner, under the same weights.

It sends the first completions of a new version to the learner, which still has that version. Generation runs ahead of
the learner, so most groups of a step come from an earlier version. If a weight update interrupted a group, the loop
sends only the completions that one version sampled completely.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from ftis_node.errors import WorkerError
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.training.train_group import train_group
from ftis_node.node.worker_interfaces import Learning
from ftis_node.records.codec import pack_group
from ftis_node.records.envelope import Accepted
from ftis_node.records.group import Group
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.swarm.peer_guard import Place

CHECK = "the mismatch measurement"


@dataclass(eq=False, repr=False)
class MismatchLoop(NodePart):
    """Loop that sends the learner at most one group of each version.

    `next_own` waits for the newest stored group of this node's own weights.
    """

    learner: Learning
    end_ids: tuple[int, ...]
    observation_form: tuple[int, ...]
    next_own: Callable[[], Awaitable[Accepted]]
    _sent_version: int | None = field(default=None, init=False)

    async def run(self) -> None:
        while True:
            accepted = await self.next_own()
            sender = accepted.group.sender  # this node, or a peer that samples with its weights
            passes = (Exception,) if sender == self.context.peer_id else ()
            with self.gossip.guard.work_for(sender, Place.AUDIT, passes=passes):
                version = self.context.state.policy_version
                if version != self._sent_version and (part := sampled_by(accepted.group, version)) is not None:
                    self._sent_version = version
                    await self._send(accepted, part)

    async def _send(self, accepted: Accepted, part: Group) -> None:
        stored = replace(
            StoredGroup.from_accepted(accepted, own=part.sender == self.context.peer_id),
            body=pack_group(part),
            rewards=part.rewards,
        )
        try:
            await self.learner.check(  # it waits for the end of the present step
                train_group(
                    stored,
                    share=self.context.manifest.step.prompt_sharing,
                    end_ids=self.end_ids,
                    observation_form=self.observation_form,
                    of_own_weights=True,
                )
            )
        except WorkerError as error:  # the train loop handles the failure; the next version gets a new check
            if self.context.failures.failed(CHECK, error):
                self.context.events.write("check_failed", group=stored.id, error=str(error))
            return
        self.context.failures.succeeded(CHECK)


def sampled_by(group: Group, version: int) -> Group | None:
    """Return the group with only the completions that `version` sampled completely; None if there are none.

    Of episodes it takes whole groups alone, because their observations are stored together.
    """
    if group.mean_logprobs:  # sent as text: there are no log-probs of tokens to compare
        return None
    completions = tuple(
        completion
        for completion in group.completions
        if completion.policy_version == completion.policy_version_newest == version
    )
    if not completions or (group.turn_lengths and len(completions) < len(group.tokens)):
        return None
    return group.with_completions(completions)
