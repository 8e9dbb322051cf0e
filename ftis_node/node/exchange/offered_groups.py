"""The groups that a trainer offers: checked, scored by the node's task, and made into groups of the node.

The trainer renders prompts itself, so its prompt may differ from the node's: another date, other variables of the
template, another template. The group names the trainer's prompt and its opening, as that of any sender.

The turns of an episode are played here, as those of any peer are at its receivers. So the trainer sends no observation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ftis_node.errors import RecordError
from ftis_node.node.context import NodeContext
from ftis_node.node.exchange.trainer_messages import OwnGroup
from ftis_node.records.codec import hash_messages, hash_prompt
from ftis_node.records.group import CompletionStatus, FinishReason, Group, SamplingSettings
from ftis_node.records.token_batch import TokenBatch
from ftis_node.tasks.base import Task, TaskItem
from ftis_node.tasks.scorer import OWN_SHARE, score_answers
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation import Refusal, ValidationContext
from ftis_node.validation.episode_replay import play_again
from ftis_node.validation.pipeline import lengths_fit_prompt
from ftis_node.validation.rules import TURN_RULES

CLOCK_SLACK_S = 1.0  # trainer and node read one clock


@dataclass(eq=False, repr=False)
class OfferedGroups:
    """Makes groups of what a trainer offers. `checks` is the context of the validation of own groups."""

    context: NodeContext
    task: Task
    checks: ValidationContext

    async def scored(self, offered: OwnGroup) -> Group | Refusal:
        """Return the trainer's group with the node's rewards. The publish loop validates all else."""
        try:
            tokens = TokenBatch.from_bytes(offered.token_ids, offered.logprobs, offered.lengths)
        except RecordError as error:
            return Refusal(error.reason, str(error))
        if refusal := self._refuse_tokens(tokens, offered.turn_lengths):
            return refusal
        if not 0 <= offered.created_at <= time.time() + CLOCK_SLACK_S:  # NaN compares false
            return Refusal("clock_skew", f"created at {offered.created_at}, which is no time before now")
        if not offered.problem < len(self.task):
            return Refusal("prompt_mismatch", f"{self.task.name} has no problem {offered.problem}")
        if offered.tokenizer != self.context.about.tokenizer:
            return Refusal("tokenizer", f"tokenizer {offered.tokenizer}, this node has {self.context.about.tokenizer}")
        item = self.task[offered.problem]
        if hash_messages(item.prompt) != offered.problem_hash:  # peers would train on them under the other text
            return Refusal("prompt_mismatch", f"problem {item.ref} has another text here")
        prompt_ids = self._prompt_ids(offered)
        if isinstance(prompt_ids, Refusal):
            return prompt_ids
        group = self._unscored(offered, tokens, prompt_ids, item)
        for rule in TURN_RULES:
            if refusal := rule(None, group, self.checks):
                return refusal
        if refusal := lengths_fit_prompt(group, prompt_ids.tolist(), self.checks):
            return refusal
        cost = ScoringCost(share=OWN_SHARE)
        scored: Group | Refusal
        if group.turn_lengths:
            played = await play_again(group, item, prompt_ids.tolist(), self.checks, cost)
            scored = played if isinstance(played, Refusal) else played[0]
        else:
            texts = self.checks.tokenizer.answer_texts(tokens, group.finish_reasons, opening=group.opening)
            rewards, statuses = zip(*await score_answers(self.checks.scorer, item, texts, cost=cost), strict=True)
            scored = replace(group, rewards=rewards, statuses=statuses)
        if cost.num_unfinished:  # peers would refuse the group
            return Refusal("scoring_timeout", f"{cost.num_unfinished} of its completions could not be scored in time")
        return scored

    def _unscored(self, offered: OwnGroup, tokens: TokenBatch, prompt_ids: NDArray[np.int32], item: TaskItem) -> Group:
        """Return the trainer's group without rewards, and without the hash of its observations."""
        end_ids = tuple(offered.end_ids) or self.checks.tokenizer.end_ids
        versions = (offered.policy_version,) * len(tokens)
        return Group(
            run_id=self.context.manifest.run_id,
            sender=self.context.peer_id,
            number=0,  # the publish loop sets it
            prompt_ref=item.ref,
            problem_hash=offered.problem_hash,
            prompt_hash=hash_prompt(prompt_ids, offered.observation_form if offered.turn_lengths else ()),
            tokens=tokens,
            finish_reasons=tuple(
                self._finish_reason(ids.tolist(), lengths, end_ids)
                for ids, lengths in zip(tokens.ids_of_each(), offered.turn_lengths or [[]] * len(tokens), strict=True)
            ),
            rewards=(0.0,) * len(tokens),
            statuses=(CompletionStatus.UNSCORED,) * len(tokens),
            policy_versions=versions,
            policy_versions_newest=versions,
            sampling=SamplingSettings(offered.temperature, offered.top_p, offered.top_k),
            model=f"trainer of {self.context.about.model}",  # no audit takes its weights for those of that name
            tokenizer=self.context.about.tokenizer,
            created_at=offered.created_at,
            end_ids=end_ids,
            opening=self.checks.tokenizer.opening_of(prompt_ids.tolist()),
            turn_lengths=tuple(map(tuple, offered.turn_lengths)),
        )

    def _finish_reason(self, ids: Sequence[int], turn_lengths: Sequence[int], end_ids: Sequence[int]) -> FinishReason:
        """Return how a completion of the trainer ended: by an end token, by a stop string of its last turn, or cut."""
        episode = self.context.manifest.episode
        has_string = (
            episode is not None
            and bool(episode.stop and turn_lengths)
            and self.checks.tokenizer.num_until_stop(ids[-turn_lengths[-1] :], episode.stop) is not None
        )
        return FinishReason.STOP if has_string or ids[-1] in end_ids else FinishReason.LENGTH

    def _refuse_tokens(self, tokens: TokenBatch, turn_lengths: Sequence[Sequence[int]]) -> Refusal | None:
        """Refuse tokens that cannot be decoded or scored. Validation has more rules, and comes later."""
        group_size, vocab_size = self.context.manifest.sampling.group_size, self.checks.tokenizer.vocab_size
        if len(tokens) != group_size:
            return Refusal("group_size", f"{len(tokens)} completions, the run has {group_size}")
        if len(tokens.logprobs) != tokens.num_tokens:
            return Refusal("logprobs", "each token needs its log-prob")
        if tokens.token_ids.view(np.uint32).max() >= vocab_size:  # a negative id is 2^31 or more
            return Refusal("token_out_of_range", f"an id outside 0..{vocab_size - 1}")
        if turn_lengths and list(map(sum, turn_lengths)) != tokens.lengths.tolist():
            return Refusal("malformed", "the turns of a completion do not have its tokens")
        return None

    def _prompt_ids(self, offered: OwnGroup) -> NDArray[np.int32] | Refusal:
        """Return the trainer's prompt. Refuse one that is none."""
        vocab_size = self.checks.tokenizer.vocab_size
        if not offered.prompt_ids or len(offered.prompt_ids) % 4:
            return Refusal("prompt_mismatch", f"a prompt of {len(offered.prompt_ids)} bytes is no list of int32")
        prompt_ids = np.frombuffer(offered.prompt_ids, "<i4")
        if prompt_ids.view(np.uint32).max() >= vocab_size:
            return Refusal("token_out_of_range", f"an id of the prompt outside 0..{vocab_size - 1}")
        return prompt_ids
