"""Groups of the replay buffer for the screens: the newest groups, those of one peer, and one group with its history."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ftis_node.records.envelope import open_envelope
from ftis_node.records.group import Completion
from ftis_node.records.text_codec import unpack_any
from ftis_node.replay.group_history import group_events
from ftis_node.replay.reader import ReplayReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.home import Home
    from ftis_node.models.tokenizer import Decoder
    from ftis_node.records.group import TextCompletion
    from ftis_node.replay.reader import GroupSummary

NUM_LISTED = 200


@dataclass(frozen=True, slots=True)
class CompletionDetail:
    """One completion. `text` is None without a tokenizer; `pieces` are its decoded tokens.

    A completion that arrived as text has no token ids, and of its log-probs only the mean is known.
    """

    text: str | None
    mean_logprob: float | None
    num_tokens: int
    finish_reason: str
    reward: float
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    pieces: tuple[str, ...] = ()
    versions: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class GroupDetail:
    """One group in full. `history` holds its lines of the event log, oldest first."""

    summary: GroupSummary
    prompt: str | None
    prompt_ids: tuple[int, ...]
    temperature: float
    weights_of: str | None
    completions: tuple[CompletionDetail, ...]
    history: tuple[dict[str, Any], ...]


def list_groups(home: Home, *, sender: str | None = None, limit: int = NUM_LISTED) -> list[GroupSummary]:
    """Return the newest groups, newest first; only those of `sender` if given. Raises ConfigError without a buffer."""
    with closing(ReplayReader(home.replay)) as reader:
        return reader.list_groups(limit=limit) if sender is None else reader.groups_of(sender, limit=limit).newest


def read_group(home: Home, group_id: str, decoder: Decoder) -> GroupDetail | None:
    """Return one group in full; None if the buffer has pruned it. Raises ConfigError without a buffer."""
    with closing(ReplayReader(home.replay)) as reader:
        found = reader.find(group_id)
        prompt_ids = reader.prompt_ids(bytes.fromhex(group_id))
    if found is None:
        return None
    summary, envelope = found
    group = unpack_any(open_envelope(envelope).body)
    completions: Sequence[Completion | TextCompletion] = group.completions
    return GroupDetail(
        summary=summary,
        prompt=decoder.text(prompt_ids, with_special_tokens=True),
        prompt_ids=prompt_ids,
        temperature=group.sampling.temperature,
        weights_of=group.weights_of,
        completions=tuple(
            _opened(completion, reward, decoder)
            for completion, reward in zip(completions, summary.rewards, strict=True)
        ),
        history=tuple(group_events(home.events, group_id)),
    )


def _opened(completion: Completion | TextCompletion, reward: float, decoder: Decoder) -> CompletionDetail:
    if not isinstance(completion, Completion):
        return CompletionDetail(
            text=completion.text,
            mean_logprob=completion.mean_logprob,
            num_tokens=completion.num_tokens,
            finish_reason=completion.finish_reason.value,
            reward=reward,
        )
    ids = tuple(completion.token_ids.tolist())
    return CompletionDetail(
        text=decoder.text(ids, with_special_tokens=True),
        token_ids=ids,
        logprobs=tuple(completion.logprobs.tolist()),
        pieces=tuple(decoder.text([token], with_special_tokens=True) or str(token) for token in ids),
        mean_logprob=float(np.mean(completion.logprobs)) if len(completion.logprobs) else completion.mean_logprob,
        num_tokens=len(ids),
        finish_reason=completion.finish_reason.value,
        reward=reward,
        versions=(completion.policy_version, completion.policy_version_newest),
    )
