"""A run's task for TRL: prompts as a data set, rewards as a reward function, episodes as a rollout function.

    prompts --> all episodes take a turn: one call of TRL --> the environment answers each --> the next turn --> batch

The turns are played as a node plays its own (`generation/rollouts.py`). So an observation follows the tokens that the
trainer sampled, in the chat template of its model, and no earlier turn is rendered again.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset

from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.errors import ConfigError, TaskError
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult, settle
from ftis_node.generation.rollouts import Playing, Sampler
from ftis_node.integrations.trl.foreign_groups import spread
from ftis_node.records.group import Completion, CompletionStatus, FinishReason, SamplingSettings, interleave
from ftis_node.tasks.base import Task, leaves
from ftis_node.tasks.episodes.episode import is_episode
from ftis_node.tasks.registry import load_task
from ftis_node.tasks.scorer import IsolatedScorer, score_answers
from ftis_node.tasks.spec import parse_spec

if TYPE_CHECKING:
    from ftis_node.integrations.trl.grpo import SwarmGRPOTrainer

Reward = Callable[..., Awaitable[list[float | None]]]
COLUMNS = ("completion_ids", "env_mask", "logprobs", "episode_reward", "scored_text")
Rollout = Callable[[Sequence[Any], "SwarmGRPOTrainer"], dict[str, Any]]


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


def swarm_rollout(run: str, *, task: str = "") -> Rollout:
    """Return the `rollout_func` of `SwarmGRPOTrainer` that plays the episodes of a run. It needs one process.

    `run` and `task` are those of `swarm_dataset`, which gives the prompts and the reward function. The limits of a turn
    and of an episode are the run's. `max_completion_length` of the trainer may shorten a turn.

    Each row of the result is a completion. `completion_ids` are all ids after the prompt. `env_mask` is 1 for a sampled
    token and 0 for an observed one. `logprobs` are vLLM's, 0 for observed tokens, or None if transformers samples. The
    reward functions get the columns `episode_reward`, None without a score, and `scored_text`, the turns with the
    observations between them. The whole mask of a row is 0 if its prompt leaves no space for a turn, or if the model
    cannot read an observation.

    Raises ConfigError for a run without episodes, and what `swarm_dataset` raises. The rollout raises ModelError for a
    chat template without a user's second message.
    """
    manifest = load_manifest(run)
    episode = manifest.episode
    if episode is None:
        raise ConfigError(f"the run {manifest.name} has no episodes: omit rollout_func")
    problems = load_problems(manifest, task)

    def rollout(prompts: Sequence[Any], trainer: SwarmGRPOTrainer) -> dict[str, Any]:
        indices = getattr(trainer, "prompt_indices", ())
        if len(indices) != len(prompts) or None in indices:
            raise ConfigError("episodes need SwarmGRPOTrainer and the column prompt_index: make it with swarm_dataset")
        if trainer.accelerator.num_processes > 1:
            raise ConfigError("episodes need one process: start the trainer without accelerate or torchrun")
        trainer.texts.encode_observation("", opening="", max_tokens=0)  # ModelError now, or each turn is the last
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        playing = [
            Playing(problems[index], trainer.texts.opening_of(ids), ids)
            for index, ids in zip(indices, prompt_ids, strict=True)
        ]

        async def play() -> None:
            async with IsolatedScorer(problems) as scorer:
                sampler = Sampler(
                    generate=TrainerEngine(trainer).generate,
                    sampling=SamplingSettings(),
                    completion_limit=manifest.sampling.completion_limit,
                    eos_ids=frozenset(trainer.texts.eos_ids),
                    tokenizer=trainer.texts,
                    scorer=scorer,
                    episode=episode,
                )
                await sampler.play_all(playing)

        _run(play())
        rows = [_row(one, trainer.texts.end_ids[0]) for one in playing]
        columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True)) | {"prompt_ids": prompt_ids}
        return columns if trainer.use_vllm else columns | {"logprobs": None}

    return rollout


class TrainerEngine:
    """The trainer's own generation as an engine. Requests that come together are sampled by one call of TRL."""

    def __init__(self, trainer: SwarmGRPOTrainer) -> None:
        self._trainer = trainer
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[GenerationResult]]] = []

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        """Return the completions; NaN for each log-prob unless vLLM samples. Raises the errors of the trainer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[GenerationResult] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._answer_all)  # after the other requests of the turn
        self._waiting.append((request, answer))
        return await answer

    def _answer_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        outcomes: Sequence[GenerationResult | Exception]
        try:
            outcomes = self._sample([request for request, _ in waiting])
        except Exception as error:
            outcomes = [error] * len(waiting)
        for (_, answer), outcome in zip(waiting, outcomes, strict=True):
            settle(answer, outcome)

    def _sample(self, requests: Sequence[GenerateRequest]) -> list[GenerationResult]:
        rows = [request for request in requests for _ in range(request.num_completions)]
        prompts = [list(request.prompt_ids) for request in rows]
        token_ids, logprobs = self._trainer._generate_single_turn(prompts, None, {}, 1)
        given = zip(rows, token_ids, logprobs or repeat(None), strict=False)
        completions = (_completion(*each) for each in given)
        return [
            GenerationResult.from_completions([next(completions) for _ in range(request.num_completions)])
            for request in requests
        ]


def _completion(request: GenerateRequest, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> Completion:
    """Return what TRL sampled, cut at the limit of the request, which may be below TRL's."""
    ids = np.array(token_ids[: request.max_tokens], dtype=np.int32)
    known = [None] * len(ids) if logprobs is None else logprobs[: len(ids)]
    reason = FinishReason.STOP if int(ids[-1]) in request.eos_ids else FinishReason.LENGTH
    return Completion(ids, np.array(known, dtype=np.float32), reason)  # None becomes NaN


def _row(one: Playing, end_id: int) -> tuple[list[int], list[int], list[float], float | None, str | None]:
    """Return ids, mask, log-probs, reward and text of an episode; a masked end token if peers could not replay it."""
    if not one.turns or one.turns[-1].finish_reason is FinishReason.ABORT:
        return [end_id], [0], [0.0], None, None
    sampled = one.completion()
    ids, places = interleave(sampled.token_ids, sampled.turn_lengths, one.observation_ids[: len(one.turns) - 1])
    mask, logprobs = (spread(values, places, size=len(ids)) for values in (1.0, sampled.logprobs))
    reward, status = one.score
    is_scored = status is CompletionStatus.SCORED
    return ids.tolist(), mask.astype(int).tolist(), logprobs.tolist(), reward if is_scored else None, one.transcript


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, in another thread if this one has a running loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, work).result()
