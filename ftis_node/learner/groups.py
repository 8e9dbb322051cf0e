"""Unpacking of groups from the daemon: the learner parses the signed body itself.

The codec bounds each field. A body that cannot be unpacked affects only its sender: the step continues without it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ftis_node.errors import RecordError
from ftis_node.records.codec import hash_prompt, unpack_any
from ftis_node.records.group import TextGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ftis_node.learner.messages import TrainGroup
    from ftis_node.records.token_batch import TokenBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnpackedGroup:
    """A `TrainGroup` with its tokens. `prompt_ids` int32 `[P]`; `rewards` one per completion.

    `mean_logprobs` is empty, unless a peer with another tokenizer sent the group as text. Then it has one mean per
    completion, in nats a token of that peer, and `tokens` has no log-probs.
    """

    group_id: str
    advantage_key: str
    own: bool
    policy_version: int
    policy_version_newest: int
    prompt_ids: NDArray[np.int32]
    tokens: TokenBatch
    rewards: tuple[float, ...]
    mean_logprobs: tuple[float, ...] = ()
    of_own_weights: bool = False
    sender: str = ""
    weight: float = 1.0


def unpack_train_group(group: TrainGroup) -> UnpackedGroup:
    """Return the group with the tokens in its body.

    Raises ValueError for a body that the codec refuses, and for fields of inconsistent sizes.
    """
    try:
        record = unpack_any(group.body)
    except RecordError as error:
        raise ValueError(f"group {group.group_id} cannot be trained on: {error}") from error
    num_completions, num_prompt_bytes = len(record.rewards), len(group.prompt_ids)
    num_texts = num_completions if isinstance(record, TextGroup) else 0
    counts = len(group.rewards), len(group.text_token_ids)
    if not num_prompt_bytes or num_prompt_bytes % 4 or counts != (num_completions, num_texts):
        sizes = f"{num_prompt_bytes} prompt bytes, {num_completions} completions, {num_texts} texts, {counts} for them"
        raise ValueError(f"group {group.group_id} cannot be trained on: {sizes}")
    unpacked = record.in_tokens(group.text_token_ids) if isinstance(record, TextGroup) else record
    prompt_ids = np.frombuffer(group.prompt_ids, "<i4")
    return UnpackedGroup(
        group_id=group.group_id,
        advantage_key=group.advantage_key,
        own=group.own,
        policy_version=unpacked.policy_version,
        policy_version_newest=unpacked.policy_version_newest,
        prompt_ids=prompt_ids,
        tokens=unpacked.tokens if isinstance(record, TextGroup) else record.tokens_ending_with(group.end_ids),
        rewards=group.rewards,
        mean_logprobs=unpacked.mean_logprobs,
        of_own_weights=group.of_own_weights and record.prompt_hash == hash_prompt(prompt_ids),
        sender=group.sender,
        weight=group.weight,
    )


def unpack_train_groups(groups: Iterable[TrainGroup]) -> tuple[list[TrainGroup], list[UnpackedGroup], tuple[str, ...]]:
    """Return the readable groups, their unpacked form, and the ids of the unreadable ones."""
    readable, unpacked, unreadable = [], [], []
    for group in groups:
        try:
            unpacked.append(unpack_train_group(group))
        except Exception:  # a peer's bytes may raise anything: the step continues, and the report names them
            logger.exception("group %s cannot be unpacked: the step leaves it out", group.group_id[:12])
            unreadable.append(group.group_id)
        else:
            readable.append(group)
    return readable, unpacked, tuple(unreadable)
