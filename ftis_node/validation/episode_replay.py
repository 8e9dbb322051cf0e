"""Replay of a peer's episodes: its sampled turns are decoded, and the environment answers them here.

The replay checks that its environment gave the texts of `observation_hash`. It also checks that no turn follows the end
of an episode, and that none is missing or cut. A sender could end an episode early, for a better reward. So an end is
refused if an honest engine would have gone on. In another chat template prompt and observations may have more tokens,
so there an early end costs nobody. A slow machine must not blame a sender, so a replay that takes too long costs only
scoring time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ftis_node.errors import ModelError
from ftis_node.records.codec import hash_observations, hash_prompt
from ftis_node.records.group import CompletionStatus, FinishReason, Group
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.episodes.episode import Play
from ftis_node.tasks.scorer import GROUP_LIMIT_S
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation.rules import Refusal, ValidationContext

OTHER_FORM_FACTOR = 2
NOTHING_PLAYED = Play((), 0, is_over=False, reward=0.0)


async def replay(
    group: Group, item: TaskItem, prompt_ids: Sequence[int], context: ValidationContext, cost: ScoringCost
) -> tuple[Group, tuple[tuple[int, ...], ...]] | Refusal:
    """Return the group with our rewards, and the ids of all observations in order; or why it is refused."""
    played = await play_again(group, item, prompt_ids, context, cost)
    if not isinstance(played, Refusal) and played[0].observation_hash != group.observation_hash:
        return Refusal("episode_mismatch", "its observations differ from those of the replay")
    return played


async def play_again(
    group: Group, item: TaskItem, prompt_ids: Sequence[int], context: ValidationContext, cost: ScoringCost
) -> tuple[Group, tuple[tuple[int, ...], ...]] | Refusal:
    """Return as `replay` does, with the hash of the observations set and not compared. Claimed rewards are not read."""
    # Models that end answers with other tokens may also have other tokens around an observation.
    prompt_hash = hash_prompt(prompt_ids, context.tokenizer.observation_form)
    is_same_form = (group.prompt_hash, group.end_ids) == (prompt_hash, context.tokenizer.end_ids)
    if FinishReason.ABORT in group.finish_reasons:  # honest nodes keep such groups for themselves
        return Refusal("episode_cut", "its sender stopped a turn")
    rewards: list[float] = []
    observations: list[tuple[str, ...]] = []
    observation_ids: list[tuple[int, ...]] = []
    for token_ids, lengths, reason in zip(
        group.tokens.ids_of_each(), group.turn_lengths, group.finish_reasons, strict=True
    ):
        turns = [ids.tolist() for ids in np.split(token_ids, np.cumsum(lengths)[:-1])]
        texts = _texts(turns, reason, group, context)
        if isinstance(texts, Refusal):
            return texts
        played = await context.scorer.play(item, texts, cost=cost) if texts else NOTHING_PLAYED
        if played is None or cost.seconds > GROUP_LIMIT_S:
            return Refusal("scoring_failed", "replaying one of its episodes failed here, or took too long")
        num_turns, is_hidden = len(lengths), len(texts) < len(lengths)
        between = played.observations[: num_turns - 1]
        if len(between) < num_turns - 1:
            return Refusal("episode_mismatch", f"{num_turns} turns, its episode ends after {played.num_turns}")
        try:
            ids = [_encoded(text, turn, group, context) for text, turn in zip(between, turns, strict=False)]
        except ModelError as error:
            return Refusal("not_encodable", str(error))
        num_tokens = len(prompt_ids) + len(token_ids) + sum(map(len, ids))
        if num_tokens > context.manifest.sampling.max_total_tokens and is_same_form:
            return Refusal("length", f"an episode of {num_tokens} tokens")
        if num_tokens > context.manifest.sampling.max_total_tokens:
            return Refusal("too_long_here", f"an episode of {num_tokens} tokens here")
        following = None
        if len(played.observations) == num_turns and reason is FinishReason.STOP:
            with suppress(ModelError):  # a model that cannot read it ends the episode
                following = _encoded(played.observations[-1], turns[-1], group, context)
        if refusal := _cut_short(lengths, reason, num_tokens, following, context, is_same_form=is_same_form):
            return refusal
        rewards.append(0.0 if is_hidden else played.reward)
        observations.append(between)
        observation_ids += ids
    scored = replace(
        group,
        rewards=tuple(rewards),
        statuses=(CompletionStatus.SCORED,) * len(rewards),
        observation_hash=hash_observations(observations),
    )
    return scored, tuple(observation_ids)


def _cut_short(
    lengths: Sequence[int],
    reason: FinishReason,
    num_tokens: int,
    following: Sequence[int] | None,
    context: ValidationContext,
    *,
    is_same_form: bool,
) -> Refusal | None:
    """Refuse an episode of `num_tokens` that ends although it has space to go on. `following` is its next observation.

    In another form all but the sampled tokens may take more space there: up to twice that of the whole text is assumed.
    """
    assert context.manifest.episode is not None  # `turns_allowed`
    limit_after = context.manifest.sampling.completion_limit
    name, factor = ("episode_mismatch", 1) if is_same_form else ("episode_cut", OTHER_FORM_FACTOR)
    if reason is FinishReason.LENGTH:
        limit = limit_after(factor * (num_tokens - lengths[-1]))
        return Refusal(name, f"a last turn of {lengths[-1]} tokens, cut below {limit}") if lengths[-1] < limit else None
    if following is None or len(lengths) == context.manifest.episode.max_turns:
        return None
    has_space = limit_after(factor * (num_tokens + len(following))) >= 1
    return Refusal(name, f"{len(lengths)} turns, its episode goes on") if has_space else None


def _texts(
    turns: Sequence[Sequence[int]], reason: FinishReason, group: Group, context: ValidationContext
) -> list[str] | Refusal:
    """Return the text of each turn; without the last one if it has a hidden special token, which gives no reward.

    Refuse a turn that goes on after a stop string, or ends without a string and an end token.
    """
    assert context.manifest.episode is not None  # `turns_allowed`
    texts = []
    for number, ids in enumerate(turns, start=1):
        is_last = number == len(turns)
        has_end = ids[-1] in group.end_ids
        if strings := context.manifest.episode.stop:
            num_until_stop = context.tokenizer.num_until_stop(ids, strings)
            if num_until_stop not in (None, len(ids)):
                return Refusal("episode_mismatch", f"turn {number} goes on after a stop string")
            if (has_end or num_until_stop is not None) != (not is_last or reason is FinishReason.STOP):
                return Refusal("episode_mismatch", f"the end of turn {number} does not fit its text")
        text = context.tokenizer.answer_text(ids, has_end=has_end, opening=group.opening)
        if text is not None:
            texts.append(text)
        elif not is_last:
            return Refusal("episode_mismatch", f"turn {number} has a hidden token, and another turn follows")
    return texts


def _encoded(text: str, turn: Sequence[int], group: Group, context: ValidationContext) -> tuple[int, ...]:
    """Return the ids of the observation after a turn."""
    assert context.manifest.episode is not None  # `turns_allowed`
    limit, has_end = context.manifest.episode.max_observation_tokens, turn[-1] in group.end_ids
    encode = context.tokenizer.encode_observation
    return tuple(encode(text, opening=group.opening, max_tokens=limit, has_end=has_end))
