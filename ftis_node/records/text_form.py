"""The text form of a group, for peers with another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from ftis_node.records.group import Group, GroupHeader, TextCompletion, TextGroup


def reencode_as_text(group: Group, group_id: bytes, *, texts: Sequence[str | None]) -> TextGroup | None:
    """Return `group` with id `group_id` as text, from the text of each completion, in order; None if one has no text.

    A completion with a special token before its end has none (`PromptTokenizer.answer_texts`).
    """
    header = {field.name: getattr(group, field.name) for field in fields(GroupHeader)}
    if None in texts:
        return None
    completions = tuple(
        TextCompletion(
            text=text or "",
            mean_logprob=float(completion.logprobs.mean(dtype=np.float64)),
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            reward=completion.reward,
        )
        for completion, text in zip(group.completions, texts, strict=True)
    )
    return TextGroup(
        **header,
        policy_version=group.policy_version,
        policy_version_newest=group.policy_version_newest,
        exact_group=group_id,
        completions=completions,
    )
