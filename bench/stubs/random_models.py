"""Groups of models with random weights (`ftis_node/lab/card/random_model.py`), as messages of the learner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ftis_node.lab.card.both_workers import HEADER, token_body
from ftis_node.lab.card.random_model import SHAPES, kept_model, save_random_model
from ftis_node.learner.groups import UnpackedGroup
from ftis_node.learner.messages import TrainGroup
from ftis_node.records.codec import hash_prompt, pack_text_group
from ftis_node.records.group import FinishReason, TextCompletion, TextGroup
from ftis_node.records.token_batch import TokenBatch

__all__ = ["SHAPES", "kept_model", "own_group", "pack_train_group", "save_random_model", "with_logprobs"]


def pack_train_group(group: UnpackedGroup) -> TrainGroup:
    """Return the message that unpacks to `group`. The header of its body has placeholder values."""
    return msgspec.structs.replace(
        group.sent,
        body=_text_body(group) if group.mean_logprobs else _token_body(group),
        text_token_ids=tuple(tuple(ids.tolist()) for ids in group.tokens.ids_of_each()) if group.mean_logprobs else (),
    )


def own_group(
    name: str,
    prompt_ids: Sequence[int] | NDArray[Any],
    tokens: TokenBatch,
    rewards: Iterable[float],
    *,
    versions: tuple[int, int] = (0, 0),
) -> UnpackedGroup:
    """Return an own group of these tokens, which `versions` sampled: its first and its last token."""
    prompt = np.asarray(prompt_ids, dtype="<i4").tobytes()
    sent = TrainGroup(name, name, own=True, body=b"", prompt_ids=prompt, rewards=tuple(rewards))
    return UnpackedGroup(sent, tokens, *versions)


def with_logprobs(group: UnpackedGroup, logprobs: NDArray[Any]) -> UnpackedGroup:
    """Return the group with its log-probs replaced by these `[n]`."""
    return replace(group, tokens=replace(group.tokens, logprobs=logprobs.astype(np.float32)))


def _token_body(group: UnpackedGroup) -> bytes:
    return token_body(
        group.prompt_ids,
        group.tokens,
        group.sent.rewards,
        versions=(group.policy_version, group.policy_version_newest),
        finish_reasons=group.finish_reasons,
    )


def _text_body(group: UnpackedGroup) -> bytes:
    completions = tuple(
        TextCompletion("", mean, int(length), FinishReason.LENGTH, reward)
        for mean, length, reward in zip(group.mean_logprobs, group.tokens.lengths, group.sent.rewards, strict=True)
    )
    packed = TextGroup(
        **HEADER | {"prompt_hash": hash_prompt(group.prompt_ids)},  # type: ignore[arg-type]
        policy_version=group.policy_version,
        policy_version_newest=group.policy_version_newest,
        exact_group=bytes(32),
        completions=completions,
    )
    return pack_text_group(packed)
