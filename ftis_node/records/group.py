"""What the node's rooms hand to each other: frozen domain records.

A *group* is the completions of one prompt by one generator. A record is made once, at the place where the thing
happens, and never changed; the wire form of a group is `codec.py`'s business and the signed bytes are `envelope.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the end-of-sequence token was sampled; it is the last token
    LENGTH = "length"  # the token limit was reached
    ABORT = "abort"  # cut short by us; what was sampled so far is kept


class CompletionStatus(StrEnum):
    """What became of a completion when it was scored."""

    SCORED = "scored"
    UNSCORED = "unscored"  # the scorer failed or ran out of time; the reward is 0


@dataclass(frozen=True, slots=True, order=True)
class PromptRef:
    """Names a prompt so that anyone with the task can make it again.

    `task` is the canonical task name without a path (`gsm8k`, `rg:chain_sum`), `split` one of `train` and `test`,
    `index` the line of the data file, or the seed of a generated problem.
    """

    task: str
    split: str
    index: int

    def __str__(self) -> str:
        return f"{self.task}/{self.split}/{self.index}"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion. Arrays are 1-d, of equal length, at least one token, the end-of-sequence token inside.

    `mean_logprob` is None but for a completion that a peer with another tokenizer told as text: then `token_ids` are
    ours, `logprobs` is empty, for none of these tokens was sampled, and this mean over the peer's own tokens is known.
    `policy_version` and `policy_version_newest` are those of the weights that sampled the first and the last token.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    reward: float = 0.0
    status: CompletionStatus = CompletionStatus.SCORED
    mean_logprob: float | None = None
    policy_version: int = 0
    policy_version_newest: int = 0


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the completions were sampled: what decides whether their log-probs are comparable."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 means no top-k


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What is said of a group in either of its forms, as it travels.

    `number` is the sender's running number (1, 2, ...). `created_at` is Unix time in seconds. `weights_of` is the peer
    whose weights sampled the group, and whose versions it names, where that is not the sender.
    """

    run_id: str
    sender: str
    number: int
    prompt_ref: PromptRef
    prompt_hash: bytes
    sampling: SamplingSettings
    model: str
    tokenizer: str
    created_at: float
    weights_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(GroupHeader):
    """The completions of one prompt by one generator, by their tokens. `text_group.py` has the other form."""

    completions: tuple[Completion, ...]

    @property
    def policy_version(self) -> int:
        """The oldest version that sampled a token of the group."""
        return min(completion.policy_version for completion in self.completions)

    @property
    def policy_version_newest(self) -> int:
        """The newest version that sampled a token of the group."""
        return max(completion.policy_version_newest for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        """Completion tokens in the group."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def rewards(self) -> tuple[float, ...]:
        """One reward a completion, in order."""
        return tuple(completion.reward for completion in self.completions)

    @property
    def reward_mean(self) -> float:
        """Mean reward of the group."""
        return sum(self.rewards) / len(self.completions)
