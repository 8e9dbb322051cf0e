"""The evaluation of a model on a task: greedy pass@1, and pass@k from samples.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1). With n samples of which c are
right it is 1 - C(n - c, k) / C(n, k). That is the probability that k of them, drawn without replacement, include a
right one.

It accepts any object with the client's `generate`: the client in a daemon, the engine in a command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import comb, inf
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ftis_node.config.manifest import EpisodeSection
from ftis_node.errors import WorkerError
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.rollouts import Sampler
from ftis_node.models import PromptTokenizer
from ftis_node.records.group import CompletionStatus, FinishReason, SamplingSettings
from ftis_node.tasks.base import Task, TaskItem
from ftis_node.tasks.scorer import IsolatedScorer

GREEDY = SamplingSettings(temperature=0.0)
SAMPLED = SamplingSettings()
RIGHT_REWARD = 1.0
PROBLEMS_IN_FLIGHT = 64
SAMPLES_PER_K = 2
ATTEMPTS = 3
RETRY_PAUSE_S = 1.0

OnProgress: TypeAlias = Callable[[int, int], None]


class Generator(Protocol):
    """The interface of a model under evaluation: an engine, or the client of one."""

    async def generate(self, request: GenerateRequest) -> GenerationResult: ...


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Means over `n` problems. `pass_at_1` is greedy; `pass_at_k` is None for k = 1.

    `truncated` counts greedy completions that reached the token limit. `unscored` counts those whose scorer failed, and
    `too_long` prompts that leave no space for an answer; both count as wrong.
    """

    pass_at_1: float
    n: int
    k: int = 1
    pass_at_k: float | None = None
    truncated: int = 0
    unscored: int = 0
    too_long: int = 0
    completion_tokens_mean: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """One completion and its score. `mean_logprob` is in nats a token.

    `text` is empty if the completion has a hidden special token (`PromptTokenizer.answer_texts`). That of an episode
    has all turns, and `last_text` the last one; None without turns.
    """

    text: str
    num_tokens: int
    mean_logprob: float
    finish_reason: FinishReason
    reward: float
    status: CompletionStatus
    last_text: str | None = None

    @property
    def answer_text(self) -> str:
        """Return the text that has the answer."""
        return self.text if self.last_text is None else self.last_text

    @property
    def is_right(self) -> bool:
        """Return whether it has the full reward; a partial reward counts as wrong."""
        return self.reward >= RIGHT_REWARD


@dataclass(frozen=True, slots=True)
class Answered:
    """One problem: its `greedy` answer, None if the prompt leaves no space for one, and `samples` for pass@k."""

    item: TaskItem
    num_prompt_tokens: int
    greedy: ScoredAnswer | None = None
    samples: tuple[ScoredAnswer, ...] = ()

    @property
    def is_right(self) -> bool:
        """Return whether the greedy answer is right."""
        return self.greedy is not None and self.greedy.is_right


def summarize(answered: Sequence[Answered], *, k: int) -> EvalResult:
    """Return the means over one or more problems; for k > 1 each has at least k samples."""
    n = len(answered)
    greedy = [problem.greedy for problem in answered if problem.greedy is not None]
    return EvalResult(
        pass_at_1=sum(answer.is_right for answer in greedy) / n,
        n=n,
        k=k,
        pass_at_k=sum(_pass_at_k(problem.samples, k) for problem in answered) / n if k > 1 else None,
        truncated=sum(answer.finish_reason is FinishReason.LENGTH for answer in greedy),
        unscored=sum(answer.status is CompletionStatus.UNSCORED for answer in greedy),
        too_long=n - len(greedy),
        completion_tokens_mean=sum(answer.num_tokens for answer in greedy) / n,
    )


async def answer_problems(
    generator: Generator,
    task: Task | Sequence[TaskItem],
    tokenizer: PromptTokenizer,
    *,
    scorer: IsolatedScorer,
    limit: int,
    completion_limit: Callable[[int], int],
    eos_ids: Iterable[int] | None = None,
    k: int = 1,
    episode: EpisodeSection | None = None,
    on_progress: OnProgress | None = None,
) -> list[Answered]:
    """Return the answers to the first `limit` problems of `task`, in order.

    `completion_limit` returns a completion's token limit for a prompt's length. One of `eos_ids` ends a completion;
    None: the tokenizer's. `episode` limits a task of several turns. For k > 1, 2 k samples are drawn for each problem,
    in addition to the greedy answer.
    `on_progress(done, of)` is called after every problem. Raises the errors of `generate`.
    """
    if limit < 1 or k < 1:
        raise ValueError("limit and k must be at least 1")
    ends = frozenset(tokenizer.eos_ids if eos_ids is None else eos_ids)
    room = asyncio.Semaphore(PROBLEMS_IN_FLIGHT)

    async def sample(
        item: TaskItem, prompt_ids: list[int], num_completions: int, sampling: SamplingSettings
    ) -> tuple[ScoredAnswer, ...]:
        sampler = Sampler(
            generate=partial(_generate, generator),
            sampling=sampling,
            completion_limit=completion_limit,
            eos_ids=ends,
            tokenizer=tokenizer,
            scorer=scorer,
            episode=episode or EpisodeSection(),
        )
        rollouts = await sampler.sample(item, prompt_ids, num_completions)
        if rollouts is None:
            return ()
        result = rollouts.result
        logprobs = result.tokens.logprobs_of_each()
        last_texts = rollouts.last_texts or (None,) * num_completions
        return tuple(map(_as_answer, logprobs, result.finish_reasons, rollouts.texts, rollouts.scores, last_texts))

    num_done, num_problems = 0, min(limit, len(task))

    async def answer(item: TaskItem) -> Answered:
        nonlocal num_done
        async with room:
            prompt_ids = tokenizer.encode_prompt(item.prompt)
            answered = Answered(item, len(prompt_ids))
            if greedy := await sample(item, prompt_ids, 1, GREEDY):
                samples = await sample(item, prompt_ids, SAMPLES_PER_K * k, SAMPLED) if k > 1 else ()
                answered = replace(answered, greedy=greedy[0], samples=samples)
        num_done += 1
        if on_progress is not None:
            on_progress(num_done, num_problems)
        return answered

    items = [task[index] for index in range(num_problems)]
    try:
        async with asyncio.TaskGroup() as tasks:  # the first error ends all
            asking = [tasks.create_task(answer(item), name=f"eval-{item.ref}") for item in items]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [asked.result() for asked in asking]


async def _generate(generator: Generator, request: GenerateRequest) -> GenerationResult:
    """Return the completions of a request, which is repeated if the worker died or its engine broke."""
    for _ in range(ATTEMPTS - 1):
        with suppress(WorkerError):
            return await generator.generate(request)
        await asyncio.sleep(RETRY_PAUSE_S)  # until a broken engine is detected
    return await generator.generate(request)


def estimate_pass_at_k(*, num_samples: int, num_right: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), for 0 <= c <= n and 1 <= k <= n."""
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def _pass_at_k(samples: Sequence[ScoredAnswer], k: int) -> float:
    num_right = sum(answer.is_right for answer in samples)
    return estimate_pass_at_k(num_samples=len(samples), num_right=num_right, k=k) if samples else 0.0


def _as_answer(
    logprobs: NDArray[np.float32],
    reason: FinishReason,
    text: str | None,
    score: tuple[float, CompletionStatus],
    last_text: str | None,
) -> ScoredAnswer:
    mean_logprob = float(logprobs.mean()) if len(logprobs) else -inf
    return ScoredAnswer(text or "", len(logprobs), mean_logprob, reason, *score, last_text)
