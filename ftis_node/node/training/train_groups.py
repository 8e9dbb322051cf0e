"""Groups as the learner reads them, built from stored ones: for a step, and for a comparison of log-probs."""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.config.step import Share
from ftis_node.learner.messages import TrainGroup
from ftis_node.replay.stored_rows import StoredGroup


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
