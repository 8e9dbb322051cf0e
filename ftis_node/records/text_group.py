"""A group sent as text, for a peer with another tokenizer that cannot use the token ids and their log-probs.

Of the log-probs only their mean over the sender's tokens remains: the geometric mean of a completion's probabilities.
The receiver compares it with the mean over its own tokens. All other fields are as in the token form.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ftis_node.records.group import CompletionStatus, Group, GroupHeader
from ftis_node.records.token_batch import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.records.group import FinishReason


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
    """The completions of one prompt by one generator, as texts. `retells` is the id of the token form.

    `prompt_hash` is `text_codec.hash_messages` of the prompt, because token ids differ between tokenizers.
    `policy_version` and `policy_version_newest` are those of the token form.
    """

    policy_version: int
    policy_version_newest: int
    retells: bytes
    completions: tuple[TextCompletion, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return one reward per completion, in order."""
        return tuple(completion.reward for completion in self.completions)

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """Return one finish reason per completion, in order."""
        return tuple(completion.finish_reason for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        """Return the number of completion tokens of the sender's tokenizer."""
        return sum(completion.num_tokens for completion in self.completions)

    def in_tokens(self, token_ids: Sequence[Sequence[int]]) -> Group:
        """Return the group with our token ids for each text, without log-probs."""
        header = {field.name: getattr(self, field.name) for field in fields(GroupHeader)}
        num_completions = len(self.completions)
        return Group(
            **header,
            tokens=TokenBatch.from_parts(token_ids),
            finish_reasons=self.finish_reasons,
            rewards=self.rewards,
            statuses=(CompletionStatus.SCORED,) * num_completions,
            policy_versions=(self.policy_version,) * num_completions,
            policy_versions_newest=(self.policy_version_newest,) * num_completions,
            mean_logprobs=tuple(completion.mean_logprob for completion in self.completions),
        )
