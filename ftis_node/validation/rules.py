"""Validation rules, cheapest first, and their inputs. Each is a pure function that returns a refusal or None.

`RULES` lists the rules for a group sent as token ids, `text_rules.py` those for a group sent as text. `pipeline.py`
runs the expensive checks after all rules have passed. Until `signature_holds` has passed, the sender is only a claim,
because any peer can write any name. docs/reference/refusals.md lists all reasons.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from ftis_node.config.manifest import RunManifest
from ftis_node.models import PromptTokenizer
from ftis_node.records.envelope import Envelope
from ftis_node.records.group import Group, PromptRef, TextGroup
from ftis_node.records.think_block import is_opening
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.tasks.scoring_worker import ScoringCost

LOGPROB_SLACK = 1e-3  # rounding may lift the log-prob of a token with probability 1 a little above 0
MAX_EQUAL_TOKENS = 16  # up to this many log-probs of a group may be equal by chance
TEMPERATURE_SLACK = 1e-6
MAX_CLOCK_SKEW_S = 60.0
MIN_GROUP_MEAN_LOGPROB = -14.0  # nats per token; a uniform choice among 10^6 tokens has -14


@dataclass(frozen=True, slots=True)
class ValidationContext:
    manifest: RunManifest
    tokenizer: PromptTokenizer
    resolve: Callable[[PromptRef, ScoringCost], Awaitable[TaskItem]]
    """Returns the problem that a reference names. Raises KeyError if there is none, TimeoutError if it is too slow."""
    scorer: IsolatedScorer
    is_known: Callable[[bytes], bool]
    """Returns true if this node has admitted a group with this id."""
    has_number: Callable[[str, int], bool]
    """Returns true if this node has admitted a group with this sender and sequence number."""
    is_banned: Callable[[str], bool] = lambda peer_id: False
    """Returns true if this node currently refuses all groups of this sender."""
    within_quota: Callable[[str], bool] = lambda peer_id: True
    """Returns true if the sender is below its rate limit. The call charges nothing."""
    may_score: Callable[[str], bool] = lambda peer_id: True
    """Returns true if the sender has scoring time left. The call charges nothing."""
    charge: Callable[[str, float], None] = lambda peer_id, seconds: None
    """Charges seconds of scoring to the sender."""
    duplicate_reason: Callable[[Group, bytes], str | None] = lambda group, group_id: None
    """Returns `duplicate_completions` or `duplicate_of_own` for a group with copied completions, else None."""
    now: Callable[[], float] = time.time
    """Unix time in seconds."""
    reset_at: float = 0.0
    """Unix time of the last buffer reset. The node does not know which earlier groups of peers it has used."""
    own_id: str = ""
    """This node's peer id."""
    newest_offered: Callable[[], int | None] = lambda: None
    """Returns the newest version of its weights that this node has offered; None if it offers none."""
    run_id: str = field(init=False)
    """The manifest's run id, cached because each look-up in the manifest compares all its settings."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", self.manifest.run_id)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of an envelope. Metrics count `reason`; log lines show `detail`."""

    reason: str
    detail: str


def same_run(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    if group.run_id == context.run_id:
        return None
    return Refusal("run", f"run {group.run_id[:8]}, this node is in {context.run_id[:8]}")


def sender_welcome(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """Refuse a sender that is banned, or missing from the allow-list if there is one."""
    return Refusal("banned", "this node refuses its sender") if context.is_banned(group.sender) else None


def within_quota(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    return None if context.within_quota(group.sender) else Refusal("quota", "its sender exceeded its rate limit")


def signature_holds(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    return None if envelope.is_signed_by(group.sender) else Refusal("signature", "not signed by its sender")


def not_seen(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """Refuse a known group, and a sequence number that is below 1 or that the sender has used before."""
    if context.is_known(envelope.id):
        return Refusal("duplicate", "this node has the group already")
    if group.number < 1 or context.has_number(group.sender, group.number):
        return Refusal("sequence_reused", f"number {group.number} of this sender was used before")
    return None


def weights_offered(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """Refuse a peer's group that claims a version of this node's weights that this node never offered."""
    if group.weights_of != context.own_id or group.sender == context.own_id:
        return None
    newest = context.newest_offered()
    if newest is None:
        return Refusal("weights_not_offered", "it claims this node's weights, and this node offers none")
    if group.policy_version_newest > newest:
        claimed = group.policy_version_newest
        return Refusal("version_not_offered", f"it claims version {claimed} of this node's weights, above {newest}")
    return None


def in_time(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """Refuse a group from the future, from before the last reset of the buffer, or older than the run accepts.

    Clocks may differ by `MAX_CLOCK_SKEW_S`.
    """
    age_s = context.now() - group.created_at
    if not -age_s <= MAX_CLOCK_SKEW_S:
        return Refusal("clock_skew", f"made {-age_s:.0f} s in the future: a clock is wrong")
    if group.sender != context.own_id and group.created_at <= context.reset_at + MAX_CLOCK_SKEW_S:
        return Refusal("stale", "made before the replay buffer of this node was reset")
    max_age_s = context.manifest.step.max_age_s
    return None if age_s <= max_age_s else Refusal("stale", f"{age_s:.0f} s old, the run uses {max_age_s:.0f}")


def same_tokenizer(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """Refuse a group of another tokenizer, because its token ids mean other tokens here."""
    if group.tokenizer == context.tokenizer.fingerprint:
        return None
    return Refusal("tokenizer", f"tokenizer {group.tokenizer}, here {context.tokenizer.fingerprint}")


def sampled_as_agreed(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    agreed = context.manifest.sampling
    if len(group.rewards) != agreed.group_size:
        return Refusal("group_size", f"{len(group.rewards)} completions, the run has {agreed.group_size}")
    sampling = group.sampling
    is_agreed = (  # NaN compares false, so it is refused
        abs(sampling.temperature - agreed.temperature) <= TEMPERATURE_SLACK
        and abs(sampling.top_p - agreed.top_p) <= TEMPERATURE_SLACK
        and sampling.top_k == agreed.top_k
    )
    return None if is_agreed else Refusal("sampling", f"sampled with {sampling}, the run requires other settings")


def ids_in_vocabulary(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """Refuse an id that the tokenizer does not have, or of which this node's model has no embedding."""
    largest = int(group.tokens.token_ids.view(np.uint32).max())  # a negative id is 2^31 or more
    if max(largest, *group.end_ids, 0) >= context.tokenizer.num_ids:
        return Refusal("token_out_of_range", f"an id outside 0..{context.tokenizer.num_ids - 1}")
    if largest >= context.tokenizer.vocab_size:
        return Refusal("no_embedding", f"it has the id {largest}, this model {context.tokenizer.vocab_size} embeddings")
    return None


def lengths_in_bounds(envelope: Envelope | None, group: Group, context: ValidationContext) -> Refusal | None:
    """Refuse a completion, or a turn of an episode, that is longer than the run allows for any prompt."""
    limit = context.manifest.sampling.completion_limit(1)
    longest = max(map(max, group.turn_lengths), default=int(group.tokens.lengths.max()))
    return Refusal("length", f"{longest} tokens, at most {limit}") if longest > limit else None


def turns_allowed(envelope: Envelope | None, group: Group, context: ValidationContext) -> Refusal | None:
    episode = context.manifest.episode
    if (episode is None) != (not group.turn_lengths):
        return Refusal("episode_mismatch", "its completions have turns, or have none, unlike those of this run")
    most = max(map(len, group.turn_lengths), default=0)
    if episode is not None and most > episode.max_turns:
        return Refusal("episode_mismatch", f"{most} turns, at most {episode.max_turns}")
    return None


def logprobs_possible(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    logprobs = group.tokens.logprobs
    if not np.isfinite(logprobs).all():
        return Refusal("logprobs", "a log-prob is not finite")
    if not logprobs.max() <= LOGPROB_SLACK:
        return Refusal("logprobs", f"a log-prob of {logprobs.max():.4g}")
    return None


def logprobs_plausible(envelope: Envelope, group: Group, context: ValidationContext) -> Refusal | None:
    """Refuse log-probs that no sampling policy produces: an absurdly low mean, or one value for all tokens.

    A policy that is certain of every token is the exception: all its log-probs are 0, and all its completions equal.
    """
    logprobs = group.tokens.logprobs
    mean = float(logprobs.mean(dtype=np.float64))
    if not mean >= MIN_GROUP_MEAN_LOGPROB:
        return Refusal("logprobs", f"a mean log-prob of {mean:.4g}")
    if len(logprobs) > MAX_EQUAL_TOKENS and logprobs[0] == logprobs[-1] and logprobs.min() == logprobs.max():
        is_one_text = len({ids.tobytes() for ids in group.tokens.ids_of_each()}) == 1
        if mean < -LOGPROB_SLACK or not is_one_text:
            return Refusal("logprobs", f"every one of {len(logprobs)} log-probs is {mean:.4g}")
    return None


def finishes_agree(envelope: Envelope | None, group: Group, context: ValidationContext) -> Refusal | None:
    """Refuse a group whose end ids contradict its finish reasons.

    A completion that stopped has an end id of its sender at its end and nowhere else. So does each turn of an episode
    but the last. Any other completion has none. An end id of another model is a token like another
    (`PromptTokenizer.answer_texts`). If the run has stop strings a turn may end without one, which `episode_replay`
    checks.
    """
    episode = context.manifest.episode
    stops = group.stops if episode is not None and episode.stop else group.turn_ends
    ids, ends = group.tokens.token_ids, group.tokens.ends
    is_eos = np.zeros(len(ids), dtype=bool)
    for end_id in group.end_ids:
        is_eos |= ids == end_id
    found = np.flatnonzero(is_eos)
    if len(found) == len(stops) and found.tolist() == stops:
        return None
    wrong = np.setxor1d(found, stops)
    reason = group.finish_reasons[int(np.searchsorted(ends, wrong[0], side="right"))]
    return Refusal("finish_reason", f"finish reason {reason.value!r} does not fit its tokens")


def opening_possible(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
    """Refuse an opening that no chat template writes: only an open or an empty think block is known."""
    return None if is_opening(group.opening) else Refusal("opening", "its opening is not a think block")


def rewards_possible(envelope: Envelope, group: Group | TextGroup, context: ValidationContext) -> Refusal | None:
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
    turns_allowed,
    lengths_in_bounds,
    rewards_possible,
    opening_possible,
    ids_in_vocabulary,
    logprobs_possible,
    logprobs_plausible,
    finishes_agree,
)
TURN_RULES = (turns_allowed, lengths_in_bounds, finishes_agree)
"""Those that a group of a trainer passes before its episodes are played. They read no envelope."""
