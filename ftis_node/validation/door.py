"""The door: bytes in, one verdict with one reason out. A node's own groups take the same door.

bytes -> size, parse, version, codec, malformed     (records: bounded before it is parsed)
      -> RULES in order                             (rules.py: pure, cheap)
      -> prompt re-made and compared                (tasks + tokenizer)
      -> rewards re-scored; the claimed ones are only compared
      -> Accepted(group with our rewards) | Refused(reason)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.records.codec import hash_prompt, unpack_group
from ftis_node.records.envelope import Accepted, open_envelope
from ftis_node.records.group import CompletionStatus
from ftis_node.validation.rules import RULES, Refusal

if TYPE_CHECKING:
    from ftis_node.records.envelope import Envelope
    from ftis_node.records.group import Group
    from ftis_node.tasks.base import TaskItem
    from ftis_node.validation.context import DoorContext

REWARD_SLACK = 1e-4  # a claimed reward may differ by the rounding of float32


@dataclass(frozen=True, slots=True)
class Refused:
    """The group is not taken. `sender` is the peer that the body names, None where that could not be read."""

    refusal: Refusal
    sender: str | None
    group_id: bytes | None


Verdict = Accepted | Refused


async def judge(data: bytes, context: DoorContext) -> Verdict:
    """The verdict on the bytes of an envelope. Never raises on any bytes."""
    envelope: Envelope | None = None
    try:
        envelope = open_envelope(data, max_bytes=context.manifest.wire.max_envelope_bytes)
        group = unpack_group(envelope.body)
    except RecordError as error:
        return Refused(Refusal(error.reason, str(error)), sender=None, group_id=envelope.id if envelope else None)
    for rule in RULES:
        if refusal := rule(envelope, group, context):
            return Refused(refusal, sender=group.sender, group_id=envelope.id)
    return await _judge_content(data, envelope, group, context)


async def _judge_content(data: bytes, envelope: Envelope, group: Group, context: DoorContext) -> Verdict:
    """The rules that cost time: the prompt is made again, the rewards are scored again."""
    try:
        item = context.resolve(group.prompt_ref)
    except KeyError:
        return Refused(Refusal("prompt", f"no problem {group.prompt_ref} here"), group.sender, envelope.id)
    prompt_ids = context.tokenizer.encode_prompt(item.prompt)
    if hash_prompt(prompt_ids) != group.prompt_hash:
        return Refused(Refusal("prompt", f"problem {group.prompt_ref} reads otherwise here"), group.sender, envelope.id)
    if refusal := _lengths_fit_prompt(group, len(prompt_ids), context):
        return Refused(refusal, group.sender, envelope.id)
    scored = await _rescore(group, item, context)
    if refusal := _rewards_agree(scored, group):
        return Refused(refusal, group.sender, envelope.id)
    return Accepted(envelope, data, scored, tuple(prompt_ids))


def _lengths_fit_prompt(group: Group, num_prompt_tokens: int, context: DoorContext) -> Refusal | None:
    limit = context.manifest.sampling.completion_limit(num_prompt_tokens)
    longest = max(len(completion.token_ids) for completion in group.completions)
    return Refusal("length", f"{longest} tokens, at most {limit} after this prompt") if longest > limit else None


def _rewards_agree(scored: Group, group: Group) -> Refusal | None:
    """The claimed rewards are ours. A text that could not be scored here counts 0, and is no lie of the sender's."""
    for completion, claimed in zip(scored.completions, group.rewards, strict=True):
        if abs(completion.reward - claimed) > REWARD_SLACK:
            if completion.status is CompletionStatus.UNSCORED:
                return Refusal("unscored", "scoring it here failed or took too long")
            return Refusal("reward", f"a claimed reward of {claimed:g}, ours is {completion.reward:g}")
    return None


async def _rescore(group: Group, item: TaskItem, context: DoorContext) -> Group:
    """The group with the rewards that we give it."""
    texts = [context.tokenizer.decode(completion.token_ids.tolist()) for completion in group.completions]
    scores = await context.scorer.score(item, texts)
    completions = tuple(
        replace(completion, reward=reward, status=status)
        for completion, (reward, status) in zip(group.completions, scores, strict=True)
    )
    return replace(group, completions=completions)
