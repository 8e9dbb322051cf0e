"""Groups of token ids for a learner without a swarm, for benchmarks and tests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ftis_node.learner.messages import TrainGroup
from ftis_node.records.codec import pack_group
from ftis_node.records.group import CompletionStatus, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.records.text_codec import pack_text_group
from ftis_node.records.text_group import TextCompletion, TextGroup

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftis_node.learner.data.groups import UnpackedGroup

SENDER = Identity.from_seed(bytes(32)).peer_id
HEADER = {
    "run_id": "0" * 32,
    "sender": SENDER,
    "number": 1,
    "prompt_ref": PromptRef("synthetic", "train", 0),
    "prompt_hash": bytes(16),
    "sampling": SamplingSettings(),
    "model": "synthetic",
    "tokenizer": "0" * 32,
    "created_at": 0.0,
}


def pack_train_group(group: UnpackedGroup) -> TrainGroup:
    """Return the message that unpacks to `group`. The header of its body has placeholder values."""
    return TrainGroup(
        group_id=group.group_id,
        advantage_key=group.advantage_key,
        own=group.own,
        body=_text_body(group) if group.mean_logprobs else _token_body(group),
        prompt_ids=group.prompt_ids.astype("<i4").tobytes(),
        rewards=group.rewards,
        text_token_ids=tuple(tuple(ids.tolist()) for ids in group.tokens.ids_of_each()) if group.mean_logprobs else (),
        of_own_weights=group.of_own_weights,
        sender=group.sender,
        weight=group.weight,
    )


def with_logprobs(group: UnpackedGroup, logprobs: NDArray[Any]) -> UnpackedGroup:
    """Return the group with its log-probs replaced by these `[n]`."""
    return replace(group, tokens=replace(group.tokens, logprobs=logprobs.astype(np.float32)))


def _token_body(group: UnpackedGroup) -> bytes:
    num_completions = len(group.tokens)
    packed = Group(
        **HEADER,  # type: ignore[arg-type]
        tokens=group.tokens,
        finish_reasons=(FinishReason.LENGTH,) * num_completions,
        rewards=group.rewards,
        statuses=(CompletionStatus.SCORED,) * num_completions,
        policy_versions=(group.policy_version,) * num_completions,
        policy_versions_newest=(group.policy_version_newest,) * num_completions,
    )
    return pack_group(packed)


def _text_body(group: UnpackedGroup) -> bytes:
    completions = tuple(
        TextCompletion("", mean, int(length), FinishReason.LENGTH, reward)
        for mean, length, reward in zip(group.mean_logprobs, group.tokens.lengths, group.rewards, strict=True)
    )
    packed = TextGroup(
        **HEADER,  # type: ignore[arg-type]
        policy_version=group.policy_version,
        policy_version_newest=group.policy_version_newest,
        retells=bytes(32),
        completions=completions,
    )
    return pack_text_group(packed)
