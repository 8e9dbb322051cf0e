"""A stored group in the learner's form."""

from __future__ import annotations

from ftis_node.config.step import Share
from ftis_node.learner.messages import TrainGroup
from ftis_node.replay.stored_rows import StoredGroup


def train_group(
    group: StoredGroup,
    *,
    share: Share,
    end_ids: tuple[int, ...] = (),
    observation_form: tuple[int, ...] = (),
    of_own_weights: bool = False,
    weight: float = 1.0,
) -> TrainGroup:
    """Return a stored group in the learner's form. For `of_own_weights` see `PeerManager.is_of_own_weights`.

    With `share` "vertical", advantages compare the completions of one group. With "horizontal", they compare all
    completions of a prompt, over all generators.
    """
    return TrainGroup(
        group_id=group.id.hex(),
        advantage_key=group.id.hex() if share == "vertical" else group.problem.hex(),
        own=group.own,
        body=group.body,
        prompt_ids=group.prompt_ids,
        rewards=group.rewards,
        text_token_ids=group.text_token_ids,
        observation_ids=group.observation_ids,
        of_own_weights=of_own_weights,
        sender=group.sender,
        weight=weight,
        end_ids=end_ids,
        observation_form=observation_form,
        task=group.prompt_ref.task,
    )
