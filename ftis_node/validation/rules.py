"""Validation rules, cheapest first: each is a pure function that returns one reason to refuse, or None.

`RULES` is the order for a group in its exact form; `text_rules.py` has the one for a group sent as text. Rules get a
parsed group whose form the codec has already checked (`size`, `parse`, `version`, `codec`, `malformed` are its
refusals). What costs time, making the prompt again and scoring, is in `pipeline.py`, after all of these have passed. Up
to `signature_holds` a group's sender is a name that anybody can write. docs/reference/rejections.md lists all reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ftis_node.records.group import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.records.envelope import Envelope
    from ftis_node.records.group import Group
    from ftis_node.records.text_group import TextGroup
    from ftis_node.validation.context import ValidationContext

LOGPROB_SLACK = 1e-3  # rounding may lift a certain token's log-prob a little above 0
MAX_EQUAL_TOKENS = 16  # so many log-probs of a group may be equal by chance
TEMPERATURE_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an envelope was not taken: `reason` is counted, `detail` is for people."""

    reason: str
    detail: str


def same_run(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """The group belongs to this run."""
    if group.run_id == context.run_id:
        return None
    return Refusal("run", f"run {group.run_id[:8]}, this node is in {context.run_id[:8]}")


def sender_welcome(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """The sender is not banned, and on the allow-list where there is one."""
    return Refusal("banned", "its sender is refused here now") if context.is_banned(group.sender) else None


def within_quota(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """The sender has not sent more than its share of this node's time."""
    return None if context.within_quota(group.sender) else Refusal("quota", "more than its sender's allowance")


def signature_holds(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """The body is signed by the peer that it names as its sender."""
    return None if envelope.is_signed_by(group.sender) else Refusal("signature", "not signed by its sender")


def not_seen(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """Neither this body nor this running number of the sender was admitted before."""
    if context.is_known(envelope.id):
        return Refusal("duplicate", "this group is here already")
    if group.number < 1 or context.has_number(group.sender, group.number):
        return Refusal("sequence_reused", f"number {group.number} of this sender was used before")
    return None


def weights_offered(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """A peer that says that this node's weights sampled its group names a version that this node has offered."""
    if group.weights_of != context.own_id or group.sender == context.own_id:
        return None
    newest = context.newest_offered()
    if newest is None:
        return Refusal("weights_of", "it claims this node's weights, which are offered to nobody")
    if group.policy_version_newest > newest:
        return Refusal("weights_of", f"it claims version {group.policy_version_newest} of this node's weights")
    return None


def in_time(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """The group is neither from the future, but for clocks that differ a little, nor older than the run uses it."""
    age_s = context.now() - group.created_at
    if not -age_s <= context.limits.max_clock_skew_s:
        return Refusal("clock_skew", f"made {-age_s:.0f} s from now: a clock is wrong")
    if group.sender != context.own_id and group.created_at <= context.reset_at + context.limits.max_clock_skew_s:
        return Refusal("stale", "made before the replay buffer of this node was reset")
    max_age_s = context.manifest.step.max_age_s
    return None if age_s <= max_age_s else Refusal("stale", f"{age_s:.0f} s old, the run uses {max_age_s:.0f}")


def same_tokenizer(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """The sender's tokenizer is this node's: ids mean the same."""
    if group.tokenizer == context.tokenizer.fingerprint:
        return None
    return Refusal("tokenizer", f"tokenizer {group.tokenizer}, here {context.tokenizer.fingerprint}")


def sampled_as_agreed(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """Group size and sampling settings are the manifest's."""
    agreed = context.manifest.sampling
    if len(group.rewards) != agreed.group_size:
        return Refusal("group_size", f"{len(group.rewards)} completions, the run has {agreed.group_size}")
    sampling = group.sampling
    is_agreed = (  # NaN compares false: asked for what is right, it is none
        abs(sampling.temperature - agreed.temperature) <= TEMPERATURE_SLACK
        and abs(sampling.top_p - agreed.top_p) <= TEMPERATURE_SLACK
        and sampling.top_k == agreed.top_k
    )
    return None if is_agreed else Refusal("sampling", f"sampled with {sampling}, not as the run says")


def ids_in_vocabulary(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """Every id is one of the tokenizer's."""
    ids = group.tokens.token_ids
    if ids.min() < 0 or ids.max() >= context.tokenizer.vocab_size:
        return Refusal("token_out_of_range", f"an id outside 0..{context.tokenizer.vocab_size - 1}")
    return None


def lengths_in_bounds(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """No completion is longer than the run allows to any prompt."""
    limit = context.manifest.sampling.completion_limit(1)
    longest = int(group.tokens.lengths.max())
    return Refusal("length", f"{longest} tokens, at most {limit}") if longest > limit else None


def logprobs_possible(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """Every log-prob is finite and not above 0 (with a little slack)."""
    logprobs = group.tokens.logprobs
    if not np.isfinite(logprobs).all():
        return Refusal("logprobs", "a log-prob is not finite")
    if not logprobs.max() <= LOGPROB_SLACK:
        return Refusal("logprobs", f"a log-prob of {logprobs.max():.4g}")
    return None


def logprobs_plausible(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """The log-probs could be those of a policy that sampled these completions: not one number, not absurdly low.

    A policy that is certain of every token has one number, 0, and then also one completion.
    """
    logprobs = group.tokens.logprobs
    mean = float(logprobs.mean(dtype=np.float64))
    if not mean >= context.limits.min_mean_logprob:
        return Refusal("logprobs", f"a mean log-prob of {mean:.4g}")
    if len(logprobs) > MAX_EQUAL_TOKENS and logprobs.min() == logprobs.max():
        is_one_text = len({ids.tobytes() for ids in group.tokens.ids_of_each()}) == 1
        if mean < -LOGPROB_SLACK or not is_one_text:
            return Refusal("logprobs", f"every one of {len(logprobs)} log-probs is {mean:.4g}")
    return None


def finishes_agree(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """A completion that claims to have stopped ends with an end-of-sequence id, any other has none."""
    ids, ends = group.tokens.token_ids, group.tokens.ends
    is_eos = np.zeros(len(ids), dtype=bool)
    for eos_id in context.tokenizer.eos_ids:
        is_eos |= ids == eos_id
    should_be = np.zeros(len(ids), dtype=bool)
    should_be[ends - 1] = [reason is FinishReason.STOP for reason in group.finish_reasons]
    wrong = np.flatnonzero(is_eos != should_be)
    if not len(wrong):
        return None
    reason = group.finish_reasons[int(np.searchsorted(ends, wrong[0], side="right"))]
    return Refusal("finish_reason", f"finish reason {reason.value!r} does not fit its tokens")


def rewards_possible(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """Every claimed reward lies in [0, 1]."""
    ok = all(0.0 <= reward <= 1.0 for reward in group.rewards)  # NaN compares false
    return None if ok else Refusal("reward_range", "a claimed reward outside [0, 1]")


RULES: tuple[Callable[[Envelope, Group, ValidationContext], Refusal | None], ...] = (
    same_run,
    sender_welcome,
    within_quota,
    signature_holds,
    not_seen,
    weights_offered,
    in_time,
    same_tokenizer,
    sampled_as_agreed,
    lengths_in_bounds,
    rewards_possible,
    ids_in_vocabulary,
    logprobs_possible,
    logprobs_plausible,
    finishes_agree,
)
