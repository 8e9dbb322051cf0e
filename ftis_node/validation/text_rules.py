"""Validation rules for a group that a peer with another tokenizer sent as text, cheapest first, and its tokenization.

This node cannot verify the sender's claims about its own tokens. It therefore tokenizes and scores the texts itself. A
peer may invent the mean log-prob, but it changes a completion's weight only up to the method's cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ftis_node.records.envelope import Envelope
from ftis_node.records.group import FinishReason, Group, TextGroup
from ftis_node.validation.rules import (
    LOGPROB_SLACK,
    MIN_GROUP_MEAN_LOGPROB,
    Refusal,
    ValidationContext,
    ids_in_vocabulary,
    in_time,
    not_seen,
    opening_possible,
    rewards_possible,
    same_run,
    sampled_as_agreed,
    sender_welcome,
    signature_holds,
    weights_offered,
    within_quota,
)

MAX_BYTES_PER_TOKEN = 64  # mean over a text; bounds the work of tokenizing
MIN_MEAN_LOGPROB = -100.0  # nats, of one completion; uniform sampling from 10^6 tokens gives -14
MIN_DISTINCT_TEXTS = 4  # two short texts may have equal means by chance


def text_is_agreed(envelope: Envelope, group: TextGroup, context: ValidationContext) -> Refusal | None:
    if context.manifest.step.other_tokenizers == "text":
        return None
    return Refusal("wrong_encoding", "this run ignores other tokenizers (step.other_tokenizers)")


def other_tokenizer(envelope: Envelope, group: TextGroup, context: ValidationContext) -> Refusal | None:
    """Refuse text from a sender with our tokenizer: its token form is available and holds more information."""
    if group.tokenizer != context.tokenizer.fingerprint:
        return None
    return Refusal("wrong_encoding", "sent as text by a sender with this node's tokenizer")


def texts_in_bounds(envelope: Envelope, group: TextGroup, context: ValidationContext) -> Refusal | None:
    """Refuse a completion longer than the run allows for any prompt, by the sender's tokens or by its bytes."""
    limit = context.manifest.sampling.completion_limit(1)
    longest = max(completion.num_tokens for completion in group.completions)
    if longest > limit:
        return Refusal("length", f"{longest} tokens of the sender's, at most {limit}")
    most_bytes = max(len(completion.text.encode()) for completion in group.completions)
    if most_bytes > limit * MAX_BYTES_PER_TOKEN:
        return Refusal("length", f"a text of {most_bytes} bytes, at most {limit * MAX_BYTES_PER_TOKEN}")
    return None


def means_possible(envelope: Envelope, group: TextGroup, context: ValidationContext) -> Refusal | None:
    """Refuse a mean log-prob that is not finite, above `LOGPROB_SLACK`, absurdly low, or equal for different texts."""
    for completion in group.completions:
        mean = completion.mean_logprob
        if not math.isfinite(mean) or not MIN_MEAN_LOGPROB <= mean <= LOGPROB_SLACK:
            return Refusal("logprobs", f"a mean log-prob of {mean:.4g}")
    num_tokens = sum(completion.num_tokens for completion in group.completions)
    mean = sum(completion.mean_logprob * completion.num_tokens for completion in group.completions) / num_tokens
    if not mean >= MIN_GROUP_MEAN_LOGPROB:
        return Refusal("logprobs", f"a mean log-prob of {mean:.4g} over the group")
    means = {completion.mean_logprob for completion in group.completions}
    if len(means) == 1 and len({completion.text for completion in group.completions}) >= MIN_DISTINCT_TEXTS:
        return Refusal("logprobs", f"the texts differ, but each has the mean log-prob {means.pop():.4g}")
    return None


def retokenize(envelope: Envelope, text_group: TextGroup, context: ValidationContext) -> Group | Refusal:
    """Return the group in our tokens, or a `Refusal` if that is impossible.

    Each text must decode to itself and have at least one token. An empty text is valid only if it stopped: its one
    token is the end-of-sequence token. Another end token of this node's model inside a text is a token like another.
    """
    tokenizer = context.tokenizer
    token_ids = []
    for completion in text_group.completions:
        ids = tokenizer.encode_text(completion.text)
        if tokenizer.decode(ids) != completion.text:
            return Refusal("not_encodable", "this node's tokenizer cannot encode one of the texts")
        if completion.finish_reason is FinishReason.STOP and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
        token_ids.append(ids)
    if not all(token_ids):
        return Refusal("not_encodable", "an empty text that did not stop")
    group = replace(text_group.in_tokens(token_ids), end_ids=tokenizer.end_ids[:1])
    return ids_in_vocabulary(envelope, group, context) or group


TEXT_RULES: tuple[Callable[[Envelope, TextGroup, ValidationContext], Refusal | None], ...] = (
    same_run,
    text_is_agreed,
    sender_welcome,
    within_quota,
    signature_holds,
    not_seen,
    weights_offered,
    in_time,
    other_tokenizer,
    sampled_as_agreed,
    texts_in_bounds,
    rewards_possible,
    opening_possible,
    means_possible,
)
