"""GroupExchange: publishes the groups of a trainer on this machine, and gives it the groups of peers.

    trainer --completions, log-probs--> publish: problem compared, scored --> publish loop --> peers
    trainer <--bodies, rewards--------- take: the run's rule, RELEASED as trained <-- buffer <-- peers

It replaces the generate and train loops in a node of the role `exchange`. The trainer renders prompts itself, so its
prompt may differ from the node's: another date, other variables of the template, another template. The group names the
trainer's prompt and its opening, as that of any sender.

The turns of an episode are played here, as those of any peer are at its receivers. So the trainer sends no observation.

The page docs/train/trl.md has all reasons for which a group or a request of the trainer is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ftis_node.errors import RecordError
from ftis_node.models import PromptTokenizer
from ftis_node.node.exchange.trainer_messages import OwnGroup, PublishedGroup
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.training.step_groups import take_groups
from ftis_node.records.codec import hash_messages, hash_prompt
from ftis_node.records.group import CompletionStatus, FinishReason, Group, SamplingSettings
from ftis_node.records.token_batch import TokenBatch
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.tasks.base import Task, TaskItem
from ftis_node.tasks.scorer import IsolatedScorer, score_answers
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation import Accepted, Refusal, ValidationContext, ValidationResult
from ftis_node.validation.episode_replay import play_again
from ftis_node.validation.pipeline import lengths_fit_prompt
from ftis_node.validation.rules import TURN_RULES

PASSING = frozenset({"busy", "paused", "scoring_timeout"})  # reasons for which the trainer may try again
MAX_STEP = 2**62
CLOCK_SLACK_S = 1.0  # trainer and node read one clock


@dataclass(eq=False, repr=False)
class GroupExchange(NodePart):
    """Both directions between the trainer and the swarm. One group is scored at a time.

    `checks` is the context of the validation of own groups. `publish_scored` numbers, signs and announces a scored
    group, and returns its verdict.
    """

    task: Task
    tokenizer: PromptTokenizer
    scorer: IsolatedScorer
    slots: SlotPool
    checks: ValidationContext
    publish_scored: Callable[[Group], Awaitable[ValidationResult]]

    def __post_init__(self) -> None:
        self._take_number = self.context.state.step  # of the last step of an earlier role
        self._has_failed = False  # the last take
        self._publishing = asyncio.Lock()
        self._taking = asyncio.Lock()

    async def resume(self) -> None:
        """Release the groups that a take before a crash left TAKEN. Number takes above those of earlier starts."""
        self.context.state.saved_step = None  # no checkpoint needs released groups again
        await self.store.disk(self.store.buffer.reconcile, MAX_STEP)
        self._take_number = max(self._take_number, self.store.reader.last_step())

    async def publish(self, offered: OwnGroup) -> PublishedGroup | Refusal:
        """Score and publish the trainer's group. Return its number and rewards, or why it is not published."""
        self.context.state.policy_version = offered.policy_version
        if self.store.space.why_full:
            return Refusal("paused", self.store.space.why_full)
        async with self._publishing:
            if not self.slots.try_charge():
                return Refusal("busy", f"peers have not fetched the last {self.slots.capacity} groups yet")
            is_submitted = False
            try:
                scored = await self._scored(offered)
                if isinstance(scored, Refusal):
                    return scored
                is_submitted = True  # the publish loop fills or frees the slot
                verdict = await self.publish_scored(scored)
            finally:
                if not is_submitted:
                    self.slots.cancel()
        if isinstance(verdict, Accepted):
            return PublishedGroup(verdict.group.number, list(verdict.group.rewards))
        return verdict.refusal

    async def take(self, count: int) -> list[StoredGroup]:
        """Take up to `count` foreign groups by the run's rule, and release them as trained.

        Take none while the disk is full.
        """
        if self.store.space.why_full:
            return []
        async with self._taking:
            if self._has_failed:  # a full disk: the trainer did not get the groups of that take
                self.context.events.write("step_lost", step=self._take_number, error="the take before failed")
                await self.store.disk.once(self.store.buffer.reconcile, self._take_number - 1)
            self._take_number += 1
            self._has_failed = True
            groups = await take_groups(self, self._take_number, own=0, foreign=count, disk=self.store.disk.once)
            await self.store.disk.once(self.store.buffer.release_step, self._take_number, ReleaseReason.TRAINED)
            self._has_failed = False
        self.context.counters.groups_trained_foreign += len(groups)
        if groups:
            self.context.counters.recent_sources.append(dict(Counter(group.sender for group in groups)))
        for group in groups:
            self.peers.note_used(group)
        return groups

    async def _scored(self, offered: OwnGroup) -> Group | Refusal:
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
        cost = ScoringCost()
        scored: Group | Refusal
        if group.turn_lengths:
            played = await play_again(group, item, prompt_ids.tolist(), self.checks, cost)
            scored = played if isinstance(played, Refusal) else played[0]
        else:
            texts = self.tokenizer.answer_texts(tokens, group.finish_reasons, opening=group.opening)
            rewards, statuses = zip(*await score_answers(self.scorer, item, texts, cost=cost), strict=True)
            scored = replace(group, rewards=rewards, statuses=statuses)
        if cost.num_unfinished:  # peers would refuse the group
            return Refusal("scoring_timeout", f"{cost.num_unfinished} of its completions could not be scored in time")
        return scored

    def _unscored(self, offered: OwnGroup, tokens: TokenBatch, prompt_ids: NDArray[np.int32], item: TaskItem) -> Group:
        """Return the trainer's group without rewards, and without the hash of its observations."""
        end_ids = tuple(offered.end_ids) or self.tokenizer.end_ids
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
            opening=self.tokenizer.opening_of(prompt_ids.tolist()),
            turn_lengths=tuple(map(tuple, offered.turn_lengths)),
        )

    def _finish_reason(self, ids: Sequence[int], turn_lengths: Sequence[int], end_ids: Sequence[int]) -> FinishReason:
        """Return how a completion of the trainer ended: by an end token, by a stop string of its last turn, or cut."""
        episode = self.context.manifest.episode
        has_string = (
            episode is not None
            and bool(episode.stop and turn_lengths)
            and self.tokenizer.num_until_stop(ids[-turn_lengths[-1] :], episode.stop) is not None
        )
        return FinishReason.STOP if has_string or ids[-1] in end_ids else FinishReason.LENGTH

    def _refuse_tokens(self, tokens: TokenBatch, turn_lengths: Sequence[Sequence[int]]) -> Refusal | None:
        """Refuse tokens that cannot be decoded or scored. Validation has more rules, and comes later."""
        group_size, vocab_size = self.context.manifest.sampling.group_size, self.tokenizer.vocab_size
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
        vocab_size = self.tokenizer.vocab_size
        if not offered.prompt_ids or len(offered.prompt_ids) % 4:
            return Refusal("prompt_mismatch", f"a prompt of {len(offered.prompt_ids)} bytes is no list of int32")
        prompt_ids = np.frombuffer(offered.prompt_ids, "<i4")
        if prompt_ids.view(np.uint32).max() >= vocab_size:
            return Refusal("token_out_of_range", f"an id of the prompt outside 0..{vocab_size - 1}")
        return prompt_ids
