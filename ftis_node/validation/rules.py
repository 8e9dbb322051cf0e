"""The rules at the door, cheapest first: each is a pure function that gives one reason to refuse, or None.

`RULES` is the order for a group in its exact form; `text_rules.py` has the one for a group told as text. Rules see a
parsed group whose form the codec has already checked (`size`, `parse`, `version`, `codec`, `malformed` are its
refusals). What costs time, making the prompt again and scoring, stands in `door.py` after all of these have passed.
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
    from ftis_node.validation.context import DoorContext

LOGPROB_SLACK = 1e-3  # rounding may lift a certain token's log-prob a little above 0
TEMPERATURE_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an envelope was not taken: `reason` is counted, `detail` is for people."""

    reason: str
    detail: str


def same_run(envelope: Envelope, group: Group | TextGroup, context: DoorContext) -> Refusal | None:
    """The group belongs to this run."""
    if group.run_id == context.manifest.run_id:
        return None
    return Refusal("run", f"run {group.run_id[:8]}, this node is in {context.manifest.run_id[:8]}")


def signature_holds(envelope: Envelope, group: Group | TextGroup, context: DoorContext) -> Refusal | None:
    """The body is signed by the peer that it names as its sender."""
    return None if envelope.is_signed_by(group.sender) else Refusal("signature", "not signed by its sender")


def not_seen(envelope: Envelope, group: Group | TextGroup, context: DoorContext) -> Refusal | None:
    """Neither this body nor this running number of the sender was admitted before."""
    if context.is_known(envelope.id):
        return Refusal("duplicate", "this group is here already")
    if group.number < 1 or context.has_number(group.sender, group.number):
        return Refusal("number", f"number {group.number} of this sender was used before")
    return None


def same_tokenizer(envelope: Envelope, group: Group, context: DoorContext) -> Refusal | None:
    """The sender's tokenizer is this node's: ids mean the same."""
    if group.tokenizer == context.tokenizer.fingerprint:
        return None
    return Refusal("tokenizer", f"tokenizer {group.tokenizer[:8]}, here {context.tokenizer.fingerprint[:8]}")


def sampled_as_agreed(envelope: Envelope, group: Group | TextGroup, context: DoorContext) -> Refusal | None:
    """Group size and sampling settings are the manifest's."""
    agreed = context.manifest.sampling
    if len(group.completions) != agreed.group_size:
        return Refusal("group_size", f"{len(group.completions)} completions, the run has {agreed.group_size}")
    sampling = group.sampling
    if (
        abs(sampling.temperature - agreed.temperature) > TEMPERATURE_SLACK
        or abs(sampling.top_p - agreed.top_p) > TEMPERATURE_SLACK
        or sampling.top_k != agreed.top_k
    ):
        return Refusal("sampling", f"sampled with {sampling}, not as the run says")
    return None


def ids_in_vocabulary(envelope: Envelope, group: Group, context: DoorContext) -> Refusal | None:
    """Every id is one of the tokenizer's."""
    for completion in group.completions:
        if completion.token_ids.min() < 0 or completion.token_ids.max() >= context.tokenizer.vocab_size:
            return Refusal("vocabulary", f"an id outside 0..{context.tokenizer.vocab_size - 1}")
    return None


def lengths_in_bounds(envelope: Envelope, group: Group, context: DoorContext) -> Refusal | None:
    """No completion is longer than the run allows to any prompt."""
    limit = context.manifest.sampling.completion_limit(1)
    longest = max(len(completion.token_ids) for completion in group.completions)
    return Refusal("length", f"{longest} tokens, at most {limit}") if longest > limit else None


def logprobs_possible(envelope: Envelope, group: Group, context: DoorContext) -> Refusal | None:
    """Every log-prob is finite and not above 0 (with a little slack)."""
    for completion in group.completions:
        if not np.isfinite(completion.logprobs).all():
            return Refusal("logprobs", "a log-prob is not finite")
        if completion.logprobs.max() > LOGPROB_SLACK:
            return Refusal("logprobs", f"a log-prob of {completion.logprobs.max():.4g}")
    return None


def finishes_agree(envelope: Envelope, group: Group, context: DoorContext) -> Refusal | None:
    """A completion that claims to have stopped ends with an end-of-sequence id, any other has none."""
    eos_ids = frozenset(context.tokenizer.eos_ids)
    for completion in group.completions:
        *before, last = completion.token_ids.tolist()
        stopped = completion.finish_reason is FinishReason.STOP
        if (last in eos_ids) != stopped or not eos_ids.isdisjoint(before):
            return Refusal("finish", f"finish reason {completion.finish_reason.value!r} does not fit its tokens")
    return None


def rewards_possible(envelope: Envelope, group: Group | TextGroup, context: DoorContext) -> Refusal | None:
    """Every claimed reward lies in [0, 1]."""
    ok = all(0.0 <= reward <= 1.0 for reward in group.rewards)  # NaN compares false
    return None if ok else Refusal("reward_range", "a claimed reward outside [0, 1]")


RULES: tuple[Callable[[Envelope, Group, DoorContext], Refusal | None], ...] = (
    same_run,
    signature_holds,
    not_seen,
    same_tokenizer,
    sampled_as_agreed,
    lengths_in_bounds,
    rewards_possible,
    ids_in_vocabulary,
    logprobs_possible,
    finishes_agree,
)
