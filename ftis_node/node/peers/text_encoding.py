"""Encoding of own groups as text, for peers with another tokenizer. Only the sender can sign the text form."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from ftis_node.records.group import GroupHeader
from ftis_node.records.text_codec import hash_messages
from ftis_node.records.text_group import TextCompletion, TextGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftis_node.models import PromptTokenizer
    from ftis_node.records.group import Group


def reencode_as_text(
    group: Group, group_id: bytes, *, messages: Sequence[Mapping[str, object]], tokenizer: PromptTokenizer
) -> TextGroup:
    """Return `group` with id `group_id` as text. `messages` are its prompt; the texts are those that were scored."""
    header = {field.name: getattr(group, field.name) for field in fields(GroupHeader)}
    header["prompt_hash"] = hash_messages(messages)
    completions = tuple(
        TextCompletion(
            text=tokenizer.decode(completion.token_ids.tolist()),
            mean_logprob=float(completion.logprobs.mean(dtype=np.float64)),
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            reward=completion.reward,
        )
        for completion in group.completions
    )
    return TextGroup(
        **header,
        policy_version=group.policy_version,
        policy_version_newest=group.policy_version_newest,
        retells=group_id,
        completions=completions,
    )
