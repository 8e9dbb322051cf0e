"""Groups of peers as rows of TRL's batches: which ones a trainer can use, and how they join its own rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ftis_node.algorithms.advantages import group_advantages
from ftis_node.algorithms.diagnostics import likelihood_gain
from ftis_node.errors import ConfigError, RecordError
from ftis_node.node.exchange.trainer_messages import TakenGroup
from ftis_node.records.codec import unpack_any
from ftis_node.records.group import Group, interleave_each

logger = logging.getLogger(__name__)
ADVANTAGE_EPS = 1e-4  # TRL's
ROW_KEYS = ("advantages", "group_ids", "sender_ids")  # `[N]`
COMPLETION_KEYS = ("completion_ids", "completion_mask", "sampling_per_token_logps", "old_per_token_logps", "tool_mask")
PROMPT_KEYS = ("prompt_ids", "prompt_mask")
REPLACED_KEYS = ("num_items_in_batch", "importance_sampling_ratio")  # counted again; unused by our losses


def foreign_rows(groups: Sequence[ForeignGroup], *, first_group: int, scale: str) -> dict[str, Tensor]:
    """Return the rows of the groups on the CPU, with ids from `first_group` on. `scale` is that of the advantages.

    `sampling_per_token_logps` holds the peers' log-probs, 0 outside the mask. Padding has the id 0. Episodes also have
    `tool_mask`: 1 for a sampled token, 0 for an observed one.
    """
    senders = {name: number for number, name in enumerate(dict.fromkeys(each.group.sender for each in groups), 1)}
    members = [(number, each) for number, each in enumerate(groups) for _ in each.rewards]
    texts = [text for each in groups for text in each.texts]
    known = [values for each in groups for values in each.group.tokens.logprobs_of_each()]
    completions = [ids for ids, _ in texts]
    logprobs = [spread(values, places, size=len(ids)) for values, (ids, places) in zip(known, texts, strict=True)]
    sampled = [spread(1.0, places, size=len(ids)) for ids, places in texts]
    group_ids = torch.tensor([number for number, _ in members]) + first_group
    rewards = torch.tensor([reward for each in groups for reward in each.rewards], dtype=torch.float32)
    prompts = [each.prompt_ids for _, each in members]
    rows = {
        "prompt_ids": _matrix(prompts, torch.int64, left=True),
        "prompt_mask": _matrix([prompt * 0 + 1 for prompt in prompts], torch.int64, left=True),
        "completion_ids": _matrix(completions, torch.int64),
        "completion_mask": _matrix([ids * 0 + 1 for ids in completions], torch.int64),
        "sampling_per_token_logps": _matrix(logprobs, torch.float32),
        "advantages": group_advantages(rewards, group_ids, scale, ADVANTAGE_EPS),
        "group_ids": group_ids,
        "sender_ids": torch.tensor([senders[each.group.sender] for _, each in members]),
    }
    is_episode = any(each.group.turn_lengths for each in groups)
    return rows | ({"tool_mask": _matrix(sampled, torch.int64)} if is_episode else {})


def exclude_understated(
    rows: Mapping[str, Tensor], learner_logprobs: Tensor, mask: Tensor, *, max_gap_nats: float
) -> tuple[dict[str, Tensor], int]:
    """Return foreign rows, and the number of groups among them that no honest sampling explains.

    `learner_logprobs` are `[N, T]`, and `mask` marks the sampled tokens. As in a node's learner (`learner/step`), a
    group is excluded if one completion is more than `max_gap_nats` likelier than its log-probs say. Its rows stay,
    because TRL needs their number. They get the advantage 0 and the learner's log-probs, so no false number is used.
    """
    gains = likelihood_gain(learner_logprobs, rows["sampling_per_token_logps"], mask)
    excluded_ids = rows["group_ids"][gains > max_gap_nats]
    is_excluded = torch.isin(rows["group_ids"], excluded_ids)
    replaced = {
        "advantages": torch.where(is_excluded, 0.0, rows["advantages"]),
        "sampling_per_token_logps": torch.where(
            is_excluded[:, None], learner_logprobs, rows["sampling_per_token_logps"]
        ),
    }
    return {**rows, **replaced}, len(set(excluded_ids.tolist()))


def spread(values: NDArray[np.float32] | float, places: NDArray[np.int64], *, size: int) -> NDArray[np.float32]:
    """Return `values` at `places`, and 0 elsewhere: `[size]`."""
    row = np.zeros(size, dtype=np.float32)
    row[places] = values
    return row


def join_batches(own: Mapping[str, Any], foreign: Mapping[str, Tensor], *, padding_id: int) -> dict[str, Any]:
    """Return TRL's batch `own` with the rows of `foreign` after it.

    An own token without a sampling log-prob gets NaN. Raises ConfigError for a batch with images.
    """
    if unknown := sorted(set(own) - {*ROW_KEYS, *COMPLETION_KEYS, *PROMPT_KEYS, *REPLACED_KEYS}):
        raise ConfigError(f"foreign groups cannot join a batch with {', '.join(unknown)}: train on text alone")
    first = dict(own)
    unknown_logprobs = torch.full(first["completion_ids"].shape, torch.nan, device=first["advantages"].device)
    first.setdefault("sampling_per_token_logps", unknown_logprobs)
    second = dict(foreign)
    if "tool_mask" in first or "tool_mask" in second:
        for each in (first, second):
            each.setdefault("tool_mask", torch.ones_like(each["completion_mask"]))
    joined = {name: torch.cat([first[name], second[name].to(first[name].dtype)]) for name in ROW_KEYS}
    for name in (*PROMPT_KEYS, *COMPLETION_KEYS):
        if name in first:
            fill = padding_id if name.endswith("_ids") else 0
            joined[name] = _stacked(first[name], second[name], fill=fill, left=name in PROMPT_KEYS)
    mask = joined["completion_mask"] * joined.get("tool_mask", 1)
    return joined | {"num_items_in_batch": mask.sum()}


def _stacked(first: Tensor, second: Tensor, *, fill: float, left: bool) -> Tensor:
    width = max(first.shape[1], second.shape[1])
    gaps = (width - first.shape[1], width - second.shape[1])
    first, second = (
        pad(each, (gap, 0) if left else (0, gap), value=fill)
        for each, gap in zip((first, second.to(first.dtype)), gaps, strict=True)
    )
    return torch.cat([first, second])


def _matrix(rows: Sequence[NDArray[np.generic]], dtype: torch.dtype, *, left: bool = False) -> Tensor:
    tensors = [torch.tensor(row.tolist(), dtype=dtype) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_side="left" if left else "right")


@dataclass(frozen=True, slots=True)
class Fit:
    """How a trainer samples, which says what it can train on.

    `tokenizer` is a fingerprint (hex), `max_completion_length` in tokens. `end_ids` are the ids at which the trainer
    ends a completion, the preferred one first. In a run of episodes `max_completion_length` bounds a turn, and
    `max_total_tokens` the prompt, all turns and observations. Otherwise it is None. `observation_form` are the ids
    around an observation.
    """

    tokenizer: str
    vocab_size: int
    group_size: int
    temperature: float
    max_completion_length: int
    top_p: float = 1.0
    top_k: int = 0
    end_ids: tuple[int, ...] = ()
    max_total_tokens: int | None = None
    observation_form: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignGroup:
    """A peer's group: prompt ids int32 `[P]`, the record, and this node's rewards, one per completion.

    Its completions end with the trainer's end ids (`Group.tokens_ending_with`). `observation_ids` are those of all
    completions, in order.
    """

    prompt_ids: NDArray[np.int32]
    group: Group
    rewards: tuple[float, ...]
    observation_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def texts(self) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Return what follows the prompt in each completion: all ids `[S]`, and where the sampled ones are `[T]`."""
        return interleave_each(self.group.tokens.ids_of_each(), self.group.turn_lengths, self.observation_ids)


def read_foreign(taken: TakenGroup, fit: Fit, *, max_prompt_length: int) -> ForeignGroup | None:
    """Return a group of the node for the trainer; None if its body is unreadable or text, or if it does not fit."""
    try:
        group = unpack_any(taken.body)
    except RecordError as error:
        logger.warning("foreign group skipped: %s is unreadable: %s", taken.id.hex()[:12], error)
        return None
    if not isinstance(group, Group):
        return None
    group = replace(group, tokens=group.tokens_ending_with(fit.end_ids))
    observation_ids = tuple(map(tuple, taken.observation_ids))
    foreign = ForeignGroup(np.frombuffer(taken.prompt_ids, "<i4").copy(), group, tuple(taken.rewards), observation_ids)
    return foreign if _is_usable(foreign, fit, max_prompt_length=max_prompt_length) else None


def _is_usable(foreign: ForeignGroup, fit: Fit, *, max_prompt_length: int) -> bool:
    """Return whether the trainer can learn from the group: one tokenizer, its sizes, and unequal rewards."""
    group, rewards, prompt = foreign.group, foreign.rewards, foreign.prompt_ids
    turns = [length for lengths in group.turn_lengths for length in lengths]
    if bool(turns) != (fit.max_total_tokens is not None):
        return False
    if turns and len(turns) - len(group.turn_lengths) != len(foreign.observation_ids):
        return False
    texts = [ids for ids, _ in foreign.texts]
    longest = max(map(len, texts))
    return (
        group.tokenizer == fit.tokenizer
        and group.sampling.temperature == fit.temperature
        and len(rewards) == len(group.tokens) == fit.group_size
        and all(map(math.isfinite, rewards))
        and min(rewards) < max(rewards)
        and 0 < len(prompt) <= max_prompt_length
        and max(turns, default=longest) <= fit.max_completion_length
        and (fit.max_total_tokens is None or len(prompt) + longest <= fit.max_total_tokens)
        and all(0 <= ids.min() and ids.max() < fit.vocab_size for ids in (prompt, *texts))
        and all(bool(np.isfinite(values).all()) for values in group.tokens.logprobs_of_each())
    )
