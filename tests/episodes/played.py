"""Groups of the episode `guess` for tests, played by a tiny model with a real engine, and lies about them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.generation.engines import choose_engine
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.rollouts import Rollouts, Sampler
from ftis_node.models import ModelSource, PromptTokenizer
from ftis_node.records.codec import hash_messages, hash_observations, hash_prompt
from ftis_node.records.group import FinishReason, Group, SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.tasks import load_task
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.scorer import IsolatedScorer

RUN = load_manifest("guess-ftis")
TASK = load_task("guess")
ITEM = TASK[0]


async def play(
    source: ModelSource, tokenizer: PromptTokenizer, items: Sequence[TaskItem], *, run: RunManifest = RUN
) -> list[Rollouts]:
    """Play each item eight times."""
    engine = await choose_engine("torch")(source, EngineSettings(vocab_size=tokenizer.vocab_size, seed=3))
    try:
        async with IsolatedScorer(TASK) as scorer:
            sampler = Sampler(
                generate=engine.generate,
                sampling=SamplingSettings(),
                completion_limit=run.sampling.completion_limit,
                eos_ids=frozenset(tokenizer.eos_ids),
                tokenizer=tokenizer,
                scorer=scorer,
                episode=run.episode,
            )
            played = [await sampler.sample(item, tokenizer.encode_prompt(item.prompt), 8) for item in items]
    finally:
        await engine.close()
    assert None not in played
    return [rollouts for rollouts in played if rollouts is not None]


def played_group(
    rollouts: Rollouts, identity: Identity, tokenizer: PromptTokenizer, *, item: TaskItem = ITEM, **changes: Any
) -> Group:
    """Return the group that the sender would publish; `changes` are those of its fields."""
    group = Group(
        run_id=RUN.run_id,
        sender=identity.peer_id,
        number=1,
        prompt_ref=item.ref,
        problem_hash=hash_messages(item.prompt),
        prompt_hash=hash_prompt(tokenizer.encode_prompt(item.prompt), tokenizer.observation_form),
        tokens=rollouts.result.tokens,
        finish_reasons=rollouts.result.finish_reasons,
        rewards=tuple(reward for reward, _ in rollouts.scores),
        statuses=tuple(status for _, status in rollouts.scores),
        policy_versions=rollouts.result.policy_versions,
        policy_versions_newest=rollouts.result.policy_versions_newest,
        sampling=SamplingSettings(),
        model="none",
        tokenizer=tokenizer.fingerprint,
        created_at=round(time.time(), 3),
        end_ids=tokenizer.end_ids,
        turn_lengths=rollouts.turn_lengths,
        observation_hash=rollouts.observation_hash,
    )
    return replace(group, **changes)


def longest(group: Group) -> int:
    """Return the completion with the most turns, two or more."""
    row = max(range(len(group.turn_lengths)), key=lambda row: len(group.turn_lengths[row]))
    assert len(group.turn_lengths[row]) > 1, "no completion of the model has two turns: choose another seed"
    return row


def one_turn_less(group: Group, item: TaskItem, tokenizer: PromptTokenizer) -> Group:
    """Leave out the last turn of a completion, with its observation, as a sender that ends an episode early."""
    row = longest(group)
    completions = list(group.completions)
    kept = sum(group.turn_lengths[row][:-1])
    old = completions[row]
    completions[row] = replace(
        old, token_ids=old.token_ids[:kept], logprobs=old.logprobs[:kept], finish_reason=FinishReason.STOP, reward=0.0
    )
    turns = list(group.turn_lengths)
    turns[row] = turns[row][:-1]
    shorter = replace(group.with_completions(completions), turn_lengths=tuple(turns))
    return replace(shorter, observation_hash=hash_observations(observations_of(shorter, item, tokenizer)))


def shorter_turn(group: Group, item: TaskItem, tokenizer: PromptTokenizer, *, row: int | None = None) -> Group:
    """Leave out the last token of a completion, as a sender that says that its length was reached."""
    if row is None:
        row = next(row for row, turns in enumerate(group.turn_lengths) if turns[-1] > 1)
    completions, turns = list(group.completions), list(group.turn_lengths)
    old = completions[row]
    completions[row] = replace(
        old, token_ids=old.token_ids[:-1], logprobs=old.logprobs[:-1], finish_reason=FinishReason.LENGTH
    )
    turns[row] = (*turns[row][:-1], turns[row][-1] - 1)
    return replace(group.with_completions(completions), turn_lengths=tuple(turns))


def observations_of(group: Group, item: TaskItem, tokenizer: PromptTokenizer) -> list[tuple[str, ...]]:
    """Return the observations between the turns, played from the texts."""
    played = []
    for ids, lengths, reason in zip(group.tokens.ids_of_each(), group.turn_lengths, group.finish_reasons, strict=True):
        turns = np.split(ids, np.cumsum(lengths)[:-1])
        stopped = [*[True] * (len(turns) - 1), reason is FinishReason.STOP]
        texts = [
            tokenizer.answer_text(turn.tolist(), has_end=has_stopped, opening="") or ""
            for turn, has_stopped in zip(turns, stopped, strict=True)
        ]
        played.append(TASK.play(item, texts).observations[: len(turns) - 1])
    return played


def shifted_turns(group: Group, item: TaskItem, tokenizer: PromptTokenizer) -> Group:
    """Move the border between two turns by one token."""
    row = longest(group)
    first, second, *rest = group.turn_lengths[row]
    step = 1 if second > 1 else -1
    turns = list(group.turn_lengths)
    turns[row] = (first + step, second - step, *rest)
    return replace(group, turn_lengths=tuple(turns))


def joined_turns(group: Group, item: TaskItem, tokenizer: PromptTokenizer) -> Group:
    """Say that two turns were one."""
    row = longest(group)
    first, second, *rest = group.turn_lengths[row]
    turns = list(group.turn_lengths)
    turns[row] = (first + second, *rest)
    return replace(group, turn_lengths=tuple(turns))


def with_reward(group: Group, item: TaskItem, tokenizer: PromptTokenizer) -> Group:
    return replace(group, rewards=((group.rewards[0] + 0.5) % 1.0, *group.rewards[1:]))


def other_observation(group: Group, item: TaskItem, tokenizer: PromptTokenizer) -> Group:
    """Say that the environment answered the longest completion otherwise."""
    observations, row = observations_of(group, item, tokenizer), longest(group)
    first, *rest = observations[row]
    observations[row] = ("+" if first == "-" else "-", *rest)
    return replace(group, observation_hash=hash_observations(observations))


def without_turns(group: Group, item: TaskItem, tokenizer: PromptTokenizer) -> Group:
    return replace(group, turn_lengths=(), observation_hash=b"")


class Lie(NamedTuple):
    """What a sender changes in a group, and the reason of the refusal."""

    change: Callable[[Group, TaskItem, PromptTokenizer], Group]
    reason: str


LIES = {
    "another observation": Lie(other_observation, "episode_mismatch"),
    "another reward": Lie(with_reward, "reward_mismatch"), "one turn less": Lie(one_turn_less, "episode_mismatch"),
    "a turn cut short": Lie(shorter_turn, "episode_mismatch"), "a moved border": Lie(shifted_turns, "finish_reason"),
    "two turns as one": Lie(joined_turns, "finish_reason"), "no turns": Lie(without_turns, "episode_mismatch"),
}  # fmt: skip
