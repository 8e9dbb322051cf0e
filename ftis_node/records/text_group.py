"""A group told as text, for a peer whose tokenizer is another: token ids and their log-probs mean nothing there.

What is left of the log-probs is their mean over the sender's tokens: the geometric mean of a completion's
probabilities, which the receiver compares with its own over its own tokens. Everything else is as in the exact form.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from ftis_node.records.group import Completion, Group, GroupHeader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.records.group import FinishReason

NO_LOGPROBS = np.empty(0, dtype=np.float32)


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
    """The completions of one prompt by one generator, as texts. `retells` is the id of the exact form.

    `prompt_hash` is `text_codec.hash_messages` of the prompt: its ids are the sender's. `policy_version` and
    `policy_version_newest` are those of the sender's exact group.
    """

    policy_version: int
    policy_version_newest: int
    retells: bytes
    completions: tuple[TextCompletion, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """One reward a completion, in order."""
        return tuple(completion.reward for completion in self.completions)

    def in_tokens(self, token_ids: Sequence[Sequence[int]]) -> Group:
        """The group by the tokens that these texts have here, one sequence a completion; no log-prob is known."""
        completions = tuple(
            Completion(
                token_ids=np.asarray(ids, dtype="<i4"),
                logprobs=NO_LOGPROBS,
                finish_reason=told.finish_reason,
                reward=told.reward,
                mean_logprob=told.mean_logprob,
                policy_version=self.policy_version,
                policy_version_newest=self.policy_version_newest,
            )
            for told, ids in zip(self.completions, token_ids, strict=True)
        )
        header = {field.name: getattr(self, field.name) for field in fields(GroupHeader)}
        return Group(**header, completions=completions)
