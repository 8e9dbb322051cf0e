"""Frozen domain records: a group, its completions, its prompt.

A *group* is the completions of one prompt by one generator. A record never changes after it is made. `codec.py` has the
wire form of a group, `envelope.py` its signed bytes.

A *text group* is sent to a peer with another tokenizer, which cannot use the token ids and their log-probs. Of the
log-probs only their mean over the sender's tokens remains: the geometric mean of a completion's probabilities. The
receiver compares it with the mean over its own tokens. All other fields are as in the token form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import accumulate, islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ftis_node.records.token_batch import TokenBatch


class FinishReason(StrEnum):
    STOP = "stop"  # it ends with an end token of the sender, or completes a stop string of the run
    LENGTH = "length"  # the token limit was reached
    ABORT = "abort"  # the node stopped it early; the tokens sampled so far are kept


class CompletionStatus(StrEnum):
    SCORED = "scored"
    UNSCORED = "unscored"  # the scorer failed or ran out of time; the reward is 0


@dataclass(frozen=True, slots=True, order=True)
class PromptRef:
    """Reference to a prompt. Every node with the task builds the same prompt from it.

    `task` is the canonical task name without a path (`gsm8k`, `rg:chain_sum`); `split` is `train` or `test`. `index` is
    the line of the data file, or the seed of a generated problem.
    """

    task: str
    split: str
    index: int

    def __str__(self) -> str:
        return f"{self.task}/{self.split}/{self.index}"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion, a view into a `TokenBatch`.

    `token_ids` int32 `[T]` and `logprobs` float32 `[T]` (nats), T at least 1, with the end-of-sequence token.
    `mean_logprob` is None, unless a peer with another tokenizer sent the completion as text. Then `token_ids` are this
    node's, `logprobs` is empty, and `mean_logprob` is the mean over the peer's own tokens.
    `policy_version` and `policy_version_newest` sampled the first and the last token. `turn_lengths` has the tokens of
    each turn of an episode, else it is empty.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    reward: float = 0.0
    status: CompletionStatus = CompletionStatus.SCORED
    mean_logprob: float | None = None
    policy_version: int = 0
    policy_version_newest: int = 0
    turn_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The sampling parameters of a group. Log-probs of two groups are comparable only if these are equal."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 means no top-k


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """The fields that the token form and the text form of a group share.

    `number` is the sender's sequence number (1, 2, ...). `created_at` is Unix time in seconds. `weights_of` is the peer
    whose weights sampled the group, None for the sender; policy versions are that peer's.

    `problem_hash` identifies the problem's messages (`codec.hash_messages`), `prompt_hash` their tokens as the sender's
    model read them (`codec.hash_prompt`), in an episode with those around an observation. `end_ids` are the ids with
    which that model ends an answer. `opening` is the beginning of the answer that its chat template wrote
    (`records/think_block.py`).
    """

    run_id: str
    sender: str
    number: int
    prompt_ref: PromptRef
    problem_hash: bytes
    prompt_hash: bytes
    sampling: SamplingSettings
    model: str
    tokenizer: str
    created_at: float
    weights_of: str | None = None
    end_ids: tuple[int, ...] = ()
    opening: str = ""

    def header(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(GroupHeader)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(GroupHeader):
    """The G completions of one prompt by one generator, as tokens. `TextGroup` is the text form.

    Each tuple has one entry per completion. `mean_logprobs` is empty, unless a peer sent the group as text.

    In an episode `tokens` are the sampled ones alone. `turn_lengths` has the tokens of each turn of a completion, which
    sum to its length. `observation_hash` identifies the texts between the turns (`codec.hash_observations`). Both are
    empty for any other task.
    """

    tokens: TokenBatch
    finish_reasons: tuple[FinishReason, ...]
    rewards: tuple[float, ...]
    statuses: tuple[CompletionStatus, ...]
    policy_versions: tuple[int, ...]
    policy_versions_newest: tuple[int, ...]
    mean_logprobs: tuple[float, ...] = ()
    turn_lengths: tuple[tuple[int, ...], ...] = ()
    observation_hash: bytes = b""

    @classmethod
    def from_completions(cls, completions: Sequence[Completion], **header: Any) -> Self:
        """Return the group of these completions; `header` has the fields of `GroupHeader`."""
        return cls(**header, **_columns(completions))

    def with_completions(self, completions: Sequence[Completion]) -> Self:
        return replace(self, **_columns(completions))

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return one view per completion, created at each call."""
        return tuple(
            Completion(ids, logprobs, *rest)
            for ids, logprobs, *rest in zip(
                self.tokens.ids_of_each(),
                self.tokens.logprobs_of_each(),
                self.finish_reasons,
                self.rewards,
                self.statuses,
                self.mean_logprobs or (None,) * len(self.tokens),
                self.policy_versions,
                self.policy_versions_newest,
                self.turn_lengths or ((),) * len(self.tokens),
                strict=True,
            )
        )

    @property
    def policy_version(self) -> int:
        """Return the oldest policy version that sampled a token of the group."""
        return min(self.policy_versions)

    @property
    def policy_version_newest(self) -> int:
        """Return the newest policy version that sampled a token of the group."""
        return max(self.policy_versions_newest)

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def tokens_ending_with(self, end_ids: Sequence[int]) -> TokenBatch:
        """Return the tokens with each stop in this model's form: one of `end_ids`, of which the first is preferred.

        The end of an answer is an event. The sender's model has its own ids for it, and the reader's model has others.
        Such an id of the reader stays, so that own samples keep a ratio of 1. Any other one becomes the first of
        `end_ids`: its probability is at most that of the event, which is the sum over `end_ids`. So the ratio is exact
        if both models have one id, and else errs by the share of the other ids (`tests/learner/test_learner_ends.py`).
        """
        others = [at for at in self.stops if int(self.tokens.token_ids[at]) not in end_ids] if end_ids else []
        if not others:
            return self.tokens
        token_ids = self.tokens.token_ids.copy()
        token_ids[others] = end_ids[0]
        return replace(self.tokens, token_ids=token_ids)

    @property
    def stops(self) -> list[int]:
        """Return the positions in `tokens` of the sampled end tokens, ascending. Only `turn_ends` have one."""
        return [at for at in self.turn_ends if int(self.tokens.token_ids[at]) in self.end_ids]

    @property
    def turn_ends(self) -> list[int]:
        """Return the positions in `tokens`, ascending, at which a turn ended by itself.

        A completion that stopped ends with one, and so does each turn of an episode but the last. It is an end token,
        or the one that completes a stop string of the run.
        """
        ends = self.tokens.ends.tolist()
        last = [end - 1 for end, reason in zip(ends, self.finish_reasons, strict=True) if reason is FinishReason.STOP]
        if not self.turn_lengths:
            return last
        starts = (self.tokens.ends - self.tokens.lengths).tolist()
        earlier = [
            start + end - 1
            for start, lengths in zip(starts, self.turn_lengths, strict=True)
            for end in accumulate(lengths[:-1])
        ]
        return sorted(earlier + last)

    @property
    def reward_mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)


def _columns(completions: Sequence[Completion]) -> dict[str, Any]:
    return {
        "tokens": join_completions(completions),
        "finish_reasons": tuple(completion.finish_reason for completion in completions),
        "rewards": tuple(completion.reward for completion in completions),
        "statuses": tuple(completion.status for completion in completions),
        "policy_versions": tuple(completion.policy_version for completion in completions),
        "policy_versions_newest": tuple(completion.policy_version_newest for completion in completions),
        "mean_logprobs": tuple(one.mean_logprob for one in completions if one.mean_logprob is not None),
        "turn_lengths": tuple(one.turn_lengths for one in completions if one.turn_lengths),
    }


def interleave(
    token_ids: NDArray[np.int32], turn_lengths: Sequence[int], observations: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the turns of a completion with the ids of the observations between them, and where the turns' tokens are.

    Both are `[S]` and `[T]` for T sampled tokens. There is one observation after each turn but the last.
    """
    turns = np.split(token_ids, np.cumsum(turn_lengths)[:-1])
    between = [*(np.array(one, dtype=np.int32) for one in observations), np.empty(0, dtype=np.int32)]
    parts = [part for pair in zip(turns, between, strict=True) for part in pair]
    is_sampled = np.concatenate([np.full(len(part), number % 2 == 0) for number, part in enumerate(parts)])
    return np.concatenate(parts), np.flatnonzero(is_sampled)


def interleave_each(
    completions: Sequence[NDArray[np.int32]],
    turn_lengths: Sequence[Sequence[int]],
    observations: Sequence[Sequence[int]],
) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Return `interleave` of each completion. `observations` are those of all completions, in order.

    Without `turn_lengths` a completion has one turn. Raises ValueError for too few observations.
    """
    if not turn_lengths:
        return [(ids, np.arange(len(ids))) for ids in completions]
    left = iter(observations)
    return [
        interleave(ids, lengths, list(islice(left, len(lengths) - 1)))
        for ids, lengths in zip(completions, turn_lengths, strict=True)
    ]


def join_completions(completions: Sequence[Completion]) -> TokenBatch:
    return TokenBatch.from_parts(
        [completion.token_ids for completion in completions],
        [completion.logprobs for completion in completions],
    )


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """One sampled completion without its special tokens; `num_tokens` and `mean_logprob` (nats) are the sender's."""

    text: str
    mean_logprob: float
    num_tokens: int
    finish_reason: FinishReason
    reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGroup(GroupHeader):
    """The completions of one prompt by one generator, as texts. `exact_group` is the id of the token form.

    `policy_version` and `policy_version_newest` are those of the token form.
    """

    policy_version: int
    policy_version_newest: int
    exact_group: bytes
    completions: tuple[TextCompletion, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(completion.reward for completion in self.completions)

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        return tuple(completion.finish_reason for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        """Return the number of completion tokens of the sender's tokenizer."""
        return sum(completion.num_tokens for completion in self.completions)

    def in_tokens(self, token_ids: Sequence[Sequence[int]]) -> Group:
        """Return the group with our token ids for each text, without log-probs."""
        num_completions = len(self.completions)
        return Group(
            **self.header(),
            tokens=TokenBatch.from_parts(token_ids),
            finish_reasons=self.finish_reasons,
            rewards=self.rewards,
            statuses=(CompletionStatus.SCORED,) * num_completions,
            policy_versions=(self.policy_version,) * num_completions,
            policy_versions_newest=(self.policy_version_newest,) * num_completions,
            mean_logprobs=tuple(completion.mean_logprob for completion in self.completions),
        )


def reencode_as_text(group: Group, group_id: bytes, *, texts: Sequence[str | None]) -> TextGroup | None:
    """Return `group` with id `group_id` as text, from the text of each completion, in order; None if one has no text.

    A completion with a special token before its end has none (`PromptTokenizer.answer_texts`).
    """
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
        **group.header(),
        policy_version=group.policy_version,
        policy_version_newest=group.policy_version_newest,
        exact_group=group_id,
        completions=completions,
    )
