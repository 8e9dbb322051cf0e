"""A run's task for TRL: its prompts as a data set, its rewards as a reward function."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from datasets import Dataset

from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.errors import ConfigError, TaskError
from ftis_node.records.group import CompletionStatus
from ftis_node.tasks.base import Task, leaves
from ftis_node.tasks.episodes.episode import is_episode
from ftis_node.tasks.registry import load_task
from ftis_node.tasks.scorer import IsolatedScorer, score_answers
from ftis_node.tasks.spec import parse_spec

Reward = Callable[..., Awaitable[list[float | None]]]


def swarm_dataset(
    run: str, *, task: str = "", num_prompts: int = 4096, seed: int | None = None
) -> tuple[Dataset, Reward]:
    """Return prompts of the run's training task, and the reward function of that task, for `GRPOTrainer`.

    `run` is a preset or a manifest file. `task` gives the local files of its parts, as `ftis-node join --task` does:
    `dataset:/data/train.jsonl?name=NAME`. The data set has the columns `prompt`, chat messages, and `prompt_index`, the
    problem's number in the task. `SwarmGRPOTrainer` gives the reward function the answers that a node scores. Another
    trainer gives it none: then the text of a completion is scored as it is. Episodes have the rewards of their rollout
    (`swarm_rollout`).

    `seed` draws the problems. If None, each call draws others, because peers take equal completions of two trainers for
    copies. Several processes of torchrun then draw the same ones.

    Raises ConfigError, TaskError, or NetworkError if the hub has the data and cannot be reached.
    """
    problems = load_problems(load_manifest(run), task)
    if seed is None and os.environ.get("WORLD_SIZE", "1") != "1":  # of torchrun: all need one data set
        seed = 0
    indices = random.Random(seed).sample(range(len(problems)), min(num_prompts, len(problems)))
    rows = [{"prompt": list(problems[index].prompt), "prompt_index": index} for index in indices]
    return Dataset.from_list(rows), _reward_of(problems)


def load_problems(manifest: RunManifest, given: str) -> Task:
    """Return the run's task with the local files of the parts of `given`. Raises TaskError for a part of no run."""
    spec = parse_spec(manifest.task)
    paths = parse_spec(given).paths if given else {}
    if unknown := paths.keys() - {part.name for part in spec.parts}:
        raise TaskError(
            f"the run {manifest.task!r} has no part {min(unknown)!r}: add ?name=NAME with the name of a part"
        )
    if given and not paths:
        raise TaskError(f"task={given!r} names no local file: omit it, or write dataset:PATH?name=NAME")
    return load_task(spec.with_paths(paths))


def _reward_of(task: Task) -> Reward:
    async def task_reward(
        completions: Sequence[Sequence[dict[str, str]]],
        prompt_index: Sequence[int],
        scored_text: Sequence[str | None] | None = None,
        episode_reward: Sequence[float | None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Return one reward in [0, 1] per completion; None if it has no score within the limits of scoring.

        `scored_text` has the texts of `PromptTokenizer.answer_text`, `episode_reward` what `swarm_rollout` returns.
        Raises ConfigError for episodes without it.
        """
        if episode_reward is not None:
            return list(episode_reward)
        if is_episode(leaves(task)[0]):
            raise ConfigError(f"{task.name} has several turns: give the trainer rollout_func=swarm_rollout(RUN)")
        if scored_text is None:
            scored_text = [completion[-1]["content"] for completion in completions]
        texts: dict[int, list[str | None]] = {}
        for text, index in zip(scored_text, prompt_index, strict=True):
            texts.setdefault(index, []).append(text)
        async with IsolatedScorer(task) as scorer:
            scores = {index: iter(await score_answers(scorer, task[index], of)) for index, of in texts.items()}
        found = [next(scores[index]) for index in prompt_index]
        return [reward if status is CompletionStatus.SCORED else None for reward, status in found]

    return task_reward
