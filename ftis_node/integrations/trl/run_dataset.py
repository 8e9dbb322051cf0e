"""A run's task for TRL: its prompts as a data set, its rewards as a reward function."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from datasets import Dataset

from ftis_node.config.manifest import load_manifest
from ftis_node.errors import TaskError
from ftis_node.records.group import CompletionStatus
from ftis_node.tasks.base import Task
from ftis_node.tasks.registry import load_task
from ftis_node.tasks.scorer import IsolatedScorer, score_answers
from ftis_node.tasks.spec import TaskSpec, parse_spec

Reward = Callable[..., Awaitable[list[float | None]]]


def swarm_dataset(run: str, *, task: str = "", num_prompts: int = 4096, seed: int = 0) -> tuple[Dataset, Reward]:
    """Return prompts of the run's training task, and the reward function of that task, for `GRPOTrainer`.

    `run` is a preset or a manifest file. `task` gives the local files of its parts, as `ftis-node join --task` does:
    `dataset:/data/train.jsonl?name=NAME`. The data set has the columns `prompt`, chat messages, and `prompt_index`, the
    problem's number in the task. `seed` draws the problems. `SwarmGRPOTrainer` gives the reward function the answers
    that a node scores. Another trainer gives it none: then the text of a completion is scored as it is.

    Raises ConfigError, TaskError, or NetworkError if the hub has the data and cannot be reached.
    """
    problems = load_task(_with_files(load_manifest(run).task, task))
    indices = random.Random(seed).sample(range(len(problems)), min(num_prompts, len(problems)))
    rows = [{"prompt": list(problems[index].prompt), "prompt_index": index} for index in indices]
    return Dataset.from_list(rows), _reward_of(problems)


def _with_files(run_task: str, given: str) -> TaskSpec:
    """Return the run's task with the local files of the parts of `given`. Raises TaskError for a part of no run."""
    spec = parse_spec(run_task)
    paths = parse_spec(given).paths if given else {}
    if unknown := paths.keys() - {part.name for part in spec.parts}:
        raise TaskError(f"the run {run_task!r} has no part {min(unknown)!r}: add ?name=NAME with the name of a part")
    if given and not paths:
        raise TaskError(f"task={given!r} names no local file: omit it, or write dataset:PATH?name=NAME")
    return spec.with_paths(paths)


def _reward_of(task: Task) -> Reward:
    async def task_reward(
        completions: Sequence[Sequence[dict[str, str]]],
        prompt_index: Sequence[int],
        scored_text: Sequence[str | None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Return one reward in [0, 1] per completion; None if it has no score within the limits of scoring.

        `scored_text` has the texts of `PromptTokenizer.answer_text`.
        """
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
