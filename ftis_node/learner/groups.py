"""Unpacking of groups from the daemon: the learner parses the signed body itself.

The codec bounds each field. A body that cannot be unpacked affects only its sender: the step continues without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ftis_node.errors import RecordError
from ftis_node.learner.messages import TrainGroup
from ftis_node.records.codec import hash_prompt, unpack_any
from ftis_node.records.group import FinishReason, TextGroup, interleave_each
from ftis_node.records.token_batch import TokenBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnpackedGroup:
    """A `TrainGroup` with the tokens and versions of its body.

    `mean_logprobs` is empty, unless a peer with another tokenizer sent the group as text. Then it has one mean per
    completion, in nats a token of that peer, and `tokens` has no log-probs. `finish_reasons` is empty for a probe.
    `turn_lengths` is empty without episodes.
    """

    sent: TrainGroup
    tokens: TokenBatch
    policy_version: int = 0
    policy_version_newest: int = 0
    mean_logprobs: tuple[float, ...] = ()
    finish_reasons: tuple[FinishReason, ...] = ()
    turn_lengths: tuple[tuple[int, ...], ...] = ()

    @property
    def texts(self) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Return what follows the prompt in each completion: all ids `[S]`, and where the sampled ones are `[L]`.

        The others are observations. They are context of the turns after them, and no loss counts them.
        """
        return interleave_each(self.tokens.ids_of_each(), self.turn_lengths, self.sent.observation_ids)

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """Return the prompt `[P]`, a view."""
        return np.frombuffer(self.sent.prompt_ids, "<i4")


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
    turn_lengths = () if isinstance(record, TextGroup) else record.turn_lengths
    if sum(len(lengths) - 1 for lengths in turn_lengths) != len(group.observation_ids):
        raise ValueError(f"group {group.group_id} cannot be trained on: its turns need other observations")
    if not num_prompt_bytes or num_prompt_bytes % 4 or counts != (num_completions, num_texts):
        sizes = f"{num_prompt_bytes} prompt bytes, {num_completions} completions, {num_texts} texts, {counts} for them"
        raise ValueError(f"group {group.group_id} cannot be trained on: {sizes}")
    unpacked = record.in_tokens(group.text_token_ids) if isinstance(record, TextGroup) else record
    tokens = unpacked.tokens if isinstance(record, TextGroup) else record.tokens_ending_with(group.end_ids)
    read_here = hash_prompt(np.frombuffer(group.prompt_ids, "<i4"), group.observation_form if turn_lengths else ())
    of_own_weights = group.of_own_weights and record.prompt_hash == read_here
    of_own_weights &= not turn_lengths or record.end_ids == group.end_ids  # else observations may have other tokens
    return UnpackedGroup(
        msgspec.structs.replace(group, of_own_weights=of_own_weights),
        tokens,
        unpacked.policy_version,
        unpacked.policy_version_newest,
        unpacked.mean_logprobs,
        unpacked.finish_reasons,
        turn_lengths,
    )


def unpack_train_groups(groups: Iterable[TrainGroup]) -> tuple[list[UnpackedGroup], tuple[str, ...]]:
    """Return the readable groups, unpacked, and the ids of the unreadable ones."""
    unpacked, unreadable = [], []
    for group in groups:
        try:
            unpacked.append(unpack_train_group(group))
        except Exception:  # a peer's bytes may raise anything: the step continues, and the report names them
            logger.exception("group %s cannot be unpacked: the step leaves it out", group.group_id[:12])
            unreadable.append(group.group_id)
    return unpacked, tuple(unreadable)
