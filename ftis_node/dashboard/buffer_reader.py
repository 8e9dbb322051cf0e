"""Groups of the replay buffer for the screens: the newest groups, those of one peer, and one group with its history."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftis_node.records.codec import unpack_any
from ftis_node.records.envelope import open_envelope
from ftis_node.replay.group_history import group_events, read_completion
from ftis_node.replay.reader import ReplayReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.home import Home
    from ftis_node.models.tokenizer import Decoder
    from ftis_node.records.group import Completion, TextCompletion
    from ftis_node.replay.group_history import CompletionDetails
    from ftis_node.replay.reader import GroupSummary

NUM_LISTED = 200


@dataclass(frozen=True, slots=True)
class GroupDetail:
    """One group in full. `pieces` are the tokens of each completion as text. `history` are its events, oldest first."""

    summary: GroupSummary
    prompt: str | None
    prompt_ids: tuple[int, ...]
    temperature: float
    weights_of: str | None
    completions: Sequence[CompletionDetails]
    pieces: Sequence[Sequence[str]]
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
    stored: Sequence[Completion | TextCompletion] = group.completions
    completions = [
        read_completion(completion, reward, decoder, with_special_tokens=True)
        for completion, reward in zip(stored, summary.rewards, strict=True)
    ]
    return GroupDetail(
        summary=summary,
        prompt=decoder.text(prompt_ids, with_special_tokens=True),
        prompt_ids=prompt_ids,
        temperature=group.sampling.temperature,
        weights_of=group.weights_of,
        completions=completions,
        pieces=[[_piece(token, decoder) for token in completion.token_ids] for completion in completions],
        history=tuple(group_events(home.events, group_id)),
    )


def _piece(token: int, decoder: Decoder) -> str:
    return decoder.text([token], with_special_tokens=True) or str(token)
