"""Validation pipeline: from bytes to one verdict with one reason. A node validates its own groups, too.

bytes -> size, parse, version, codec, malformed     (records/: sizes are bounded before parsing)
      -> RULES or TEXT_RULES in order               (rules.py, text_rules.py: pure, cheap)
      -> problem rebuilt and compared, and rendered by this node's chat template
      -> a group sent as text: tokenized here       (text_rules.py)
      -> copied completions                         (swarm/duplicates.py)
      -> episodes replayed turn by turn             (episode_replay.py)
      -> rewards scored, except those of own groups; claimed rewards are only compared
      -> Accepted(group with our rewards) | Refused(reason)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftis_node.errors import MachineError, ModelError, RecordError, WorkerError
from ftis_node.records.codec import hash_messages, hash_prompt, unpack_any
from ftis_node.records.envelope import Accepted, Envelope, open_envelope
from ftis_node.records.group import CompletionStatus, Group, PromptRef, TextGroup
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.scorer import score_answers
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation.episode_replay import replay
from ftis_node.validation.rules import RULES, Refusal, ValidationContext, signature_holds
from ftis_node.validation.text_rules import TEXT_RULES, retokenize

Rule = Callable[[Envelope, Any, ValidationContext], Refusal | None]


REWARD_SLACK = 1e-4  # a claimed reward may differ by the rounding of float32


@dataclass(frozen=True, slots=True)
class Refused:
    """Refusal of a group. `sender` is the peer that the body names, None if the body could not be read.

    `signed` is true if the sender's signature was verified before the refusal. `num_tokens` is the body's claim, at
    most one for each of its bytes.
    """

    refusal: Refusal
    sender: str | None
    group_id: bytes | None
    signed: bool = False
    num_tokens: int = 0


ValidationResult = Accepted | Refused


async def validate(
    data: bytes, context: ValidationContext, *, requested: Container[bytes] | None = None, made: Group | None = None
) -> ValidationResult:
    """Return the verdict on the bytes of an envelope. Never raises on any bytes.

    `requested` holds the requested ids if the envelope answers a request; any other group is refused. `made` is the
    group that this node sealed in the envelope; its completions are not scored again.
    """
    envelope: Envelope | None = None
    try:
        envelope = open_envelope(data, max_bytes=context.manifest.wire.max_envelope_bytes)
        if requested is not None and envelope.id not in requested:
            raise RecordError("unsolicited", "a group that was not requested")
        unpacked = unpack_any(envelope.body, codecs=context.manifest.wire.codecs)
    except RecordError as error:
        return Refused(Refusal(error.reason, str(error)), sender=None, group_id=envelope.id if envelope else None)
    num_tokens = min(unpacked.num_tokens, len(envelope.body))  # empty texts may claim any number
    rules: Sequence[Rule] = RULES if isinstance(unpacked, Group) else TEXT_RULES
    is_signed = False
    for rule in rules:
        if refusal := rule(envelope, unpacked, context):
            return Refused(refusal, unpacked.sender, envelope.id, signed=is_signed, num_tokens=num_tokens)
        is_signed |= rule is signature_holds
    verdict: Accepted | Refusal
    if context.may_score(unpacked.sender):
        cost = ScoringCost()
        try:
            verdict = await _judge_content(data, envelope, unpacked, context, cost, made)
        finally:
            context.charge(unpacked.sender, cost.seconds)
    else:
        verdict = Refusal("scoring_quota", "scoring its sender's groups exceeded the time limit")
    if isinstance(verdict, Refusal):
        return Refused(verdict, unpacked.sender, envelope.id, signed=True, num_tokens=num_tokens)
    return verdict


async def _judge_content(
    data: bytes,
    envelope: Envelope,
    unpacked: Group | TextGroup,
    context: ValidationContext,
    cost: ScoringCost,
    made: Group | None,
) -> Accepted | Refusal:
    item = await _resolve(unpacked.prompt_ref, context, cost)
    if isinstance(item, Refusal):
        return item
    if hash_messages(item.prompt) != unpacked.problem_hash:
        return Refusal("prompt_mismatch", f"problem {unpacked.prompt_ref} has another text here")
    try:
        prompt_ids = context.tokenizer.encode_prompt(item.prompt, opening=unpacked.opening)
    except ModelError as error:
        return Refusal("not_encodable", str(error))
    group = unpacked if isinstance(unpacked, Group) else retokenize(envelope, unpacked, context)
    if isinstance(group, Refusal):
        return group
    if refusal := lengths_fit_prompt(group, prompt_ids, context):
        return refusal
    if reason := context.duplicate_reason(group, envelope.id):
        return Refusal(reason, "too many of its completions are duplicates")
    observation_ids: tuple[tuple[int, ...], ...] = ()
    if group.turn_lengths:
        replayed = await replay(group, item, prompt_ids, context, cost)
        if isinstance(replayed, Refusal):
            return replayed
        scored, observation_ids = replayed
    elif made is not None and made.tokens.has_same_ids(group.tokens):
        scored = replace(group, rewards=made.rewards, statuses=made.statuses)
    else:
        texts = context.tokenizer.answer_texts(group.tokens, group.finish_reasons, opening=group.opening)
        rewards, statuses = zip(*await score_answers(context.scorer, item, texts, cost=cost), strict=True)
        scored = replace(group, rewards=rewards, statuses=statuses)
    if cost.num_lost:
        return Refusal("scoring_failed", "this machine did not finish scoring it: it is busy, or its process was ended")
    if cost.num_stopped:
        return Refusal("scoring_timeout", f"scoring {cost.num_stopped} of its completions took the whole time limit")
    if refusal := _rewards_agree(scored, group):
        return refusal
    exact_group = None if isinstance(unpacked, Group) else unpacked.exact_group
    return Accepted(envelope, data, scored, tuple(prompt_ids), exact_group, observation_ids)


async def _resolve(ref: PromptRef, context: ValidationContext, cost: ScoringCost) -> TaskItem | Refusal:
    """Return the problem, or a `Refusal` if there is none.

    The sender chose the problem's index, so an exception while making the problem refuses the group.
    """
    try:
        return await context.resolve(ref, cost)
    except KeyError:
        return Refusal("prompt_mismatch", f"no problem {ref} here")
    except TimeoutError:
        if cost.num_lost:
            return Refusal("scoring_failed", f"this machine did not finish making problem {ref}")
        return Refusal("scoring_timeout", f"problem {ref} takes too long to make")
    except (MachineError, WorkerError):
        raise
    except Exception as error:
        return Refusal("prompt_mismatch", f"problem {ref} cannot be made: {type(error).__name__}")


def lengths_fit_prompt(group: Group, prompt_ids: Sequence[int], context: ValidationContext) -> Refusal | None:
    """Refuse completions that exceed the limit after this prompt. Another rendering of the prompt is no fault.

    Of an episode only the first turns follow the prompt. `replay` checks the others.
    """
    num_prompt_tokens = len(prompt_ids)
    longest = max((turns[0] for turns in group.turn_lengths), default=int(group.tokens.lengths.max()))
    limit = context.manifest.sampling.space_after(num_prompt_tokens)
    if longest <= limit:
        return None
    detail = f"{longest} tokens, at most {limit} after the prompt of {num_prompt_tokens} tokens"
    form = context.tokenizer.observation_form if group.turn_lengths else ()
    if group.prompt_hash == hash_prompt(prompt_ids, form):
        return Refusal("length", detail)
    return Refusal("too_long_here", detail)


def _rewards_agree(scored: Group, group: Group) -> Refusal | None:
    """Refuse claimed rewards that differ from ours.

    A text that this node failed to score has reward 0 here. The sender is then not at fault (`scoring_failed`).
    """
    for reward, status, claimed in zip(scored.rewards, scored.statuses, group.rewards, strict=True):
        if not abs(reward - claimed) <= REWARD_SLACK:
            if status is CompletionStatus.UNSCORED:
                return Refusal("scoring_failed", "scoring it here failed or took too long")
            return Refusal("reward_mismatch", f"a claimed reward of {claimed:g}, ours is {reward:g}")
    return None
