"""How well a model solves a task: greedy pass@1, and pass@k from samples.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1): with n samples of which c are
right, 1 - C(n - c, k) / C(n, k), the chance that k of them drawn without replacement hold a right one.

Works over anything with the client's `generate`: the client in a daemon, `local.LocalGenerator` in a command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ftis_node.errors import WorkerError
from ftis_node.records.group import CompletionStatus, FinishReason, SamplingSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.generation.engines.base import GenerationResult
    from ftis_node.models import PromptTokenizer
    from ftis_node.records.group import Completion
    from ftis_node.tasks.base import Task, TaskItem
    from ftis_node.validation.context import Scorer

GREEDY = SamplingSettings(temperature=0.0)
SAMPLED = SamplingSettings()
RIGHT_REWARD = 1.0

OnProgress: TypeAlias = Callable[[int, int], None]


class Generator(Protocol):
    """What can be evaluated."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_completions: int,
        sampling: SamplingSettings,
        max_tokens: int,
        seed: int | None = None,
    ) -> GenerationResult: ...


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Means over `n` problems. `pass_at_1` is greedy; `pass_at_k` is None for k = 1.

    `truncated` counts greedy completions that hit the token limit, `unscored` those whose scorer failed, `too_long`
    prompts that leave no room for an answer; the latter two count as wrong.
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
class _Grade:
    """One problem's figures."""

    is_right: bool
    pass_at_k: float = 0.0
    num_tokens: int = 0
    is_truncated: bool = False
    is_unscored: bool = False
    is_too_long: bool = False


@dataclass(frozen=True, slots=True)
class _Grader:
    """Takes problems to grades; the fields are `evaluate`'s."""

    generator: Generator
    tokenizer: PromptTokenizer
    scorer: Scorer
    completion_limit: Callable[[int], int]
    k: int
    num_samples: int
    sampling: SamplingSettings
    attempts: int
    retry_pause_s: float

    async def grade(self, item: TaskItem) -> _Grade:
        """One problem."""
        prompt_ids = self.tokenizer.encode_prompt(item.prompt)
        if self.completion_limit(len(prompt_ids)) < 1:
            return _Grade(is_right=False, is_too_long=True)
        (greedy,), ((reward, status),) = await self._answer(item, prompt_ids, num_completions=1, sampling=GREEDY)
        return _Grade(
            is_right=reward >= RIGHT_REWARD,
            pass_at_k=await self._estimate(item, prompt_ids) if self.k > 1 else 0.0,
            num_tokens=len(greedy.token_ids),
            is_truncated=greedy.finish_reason is FinishReason.LENGTH,
            is_unscored=status is CompletionStatus.UNSCORED,
        )

    async def _estimate(self, item: TaskItem, prompt_ids: list[int]) -> float:
        _, scores = await self._answer(item, prompt_ids, num_completions=self.num_samples, sampling=self.sampling)
        num_right = sum(reward >= RIGHT_REWARD for reward, _ in scores)
        return estimate_pass_at_k(num_samples=self.num_samples, num_right=num_right, k=self.k)

    async def _answer(
        self, item: TaskItem, prompt_ids: list[int], *, num_completions: int, sampling: SamplingSettings
    ) -> tuple[tuple[Completion, ...], list[tuple[float, CompletionStatus]]]:
        """Completions with their scores."""
        max_tokens = self.completion_limit(len(prompt_ids))
        for attempt in range(1, self.attempts + 1):
            try:
                result = await self.generator.generate(
                    prompt_ids, num_completions=num_completions, sampling=sampling, max_tokens=max_tokens
                )
                break
            except WorkerError:
                if attempt == self.attempts:
                    raise
                await asyncio.sleep(
                    self.retry_pause_s
                )  # an engine that broke is missed by then: calls wait for its next life
        texts = [self.tokenizer.decode(completion.token_ids.tolist()) for completion in result.completions]
        return result.completions, await self.scorer.score(item, texts)


async def evaluate(
    generator: Generator,
    task: Task,
    tokenizer: PromptTokenizer,
    *,
    scorer: Scorer,
    limit: int,
    completion_limit: Callable[[int], int],
    k: int = 1,
    num_samples: int | None = None,
    sampling: SamplingSettings = SAMPLED,
    problems_in_flight: int = 64,
    attempts: int = 3,
    retry_pause_s: float = 1.0,
    on_progress: OnProgress | None = None,
) -> EvalResult:
    """Grade the first `limit` problems of `task`.

    `completion_limit` gives a completion's token limit for a prompt's length. For k > 1, `num_samples` (default 2 k) at
    `sampling` are drawn a problem beside the greedy one. `on_progress(done, of)` is called after every problem. A
    problem is asked again, `attempts` times in all and `retry_pause_s` seconds apart, where the worker died or its
    engine broke. Raises ValueError for a limit or k below 1 and num_samples below k, and what `generate` raises.
    """
    num_samples = 2 * k if num_samples is None else num_samples
    if limit < 1 or k < 1 or num_samples < k:
        raise ValueError("limit and k must be at least 1 and num_samples at least k")
    grader = _Grader(generator, tokenizer, scorer, completion_limit, k, num_samples, sampling, attempts, retry_pause_s)
    items = [task[index] for index in range(min(limit, len(task)))]
    return _summary(await _grade_all(grader, items, problems_in_flight, on_progress), k=k)


def estimate_pass_at_k(*, num_samples: int, num_right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), for 0 <= c <= n and 1 <= k <= n."""
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


async def _grade_all(
    grader: _Grader, items: Sequence[TaskItem], problems_in_flight: int, on_progress: OnProgress | None
) -> list[_Grade]:
    """Grades in the order of `items`; the first failure ends all and is raised as itself."""
    room = asyncio.Semaphore(problems_in_flight)
    num_done = 0

    async def grade(item: TaskItem) -> _Grade:
        nonlocal num_done
        async with room:
            graded = await grader.grade(item)
        num_done += 1
        if on_progress is not None:
            on_progress(num_done, len(items))
        return graded

    try:
        async with asyncio.TaskGroup() as tasks:
            grading = [tasks.create_task(grade(item), name=f"eval-{item.ref}") for item in items]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [task.result() for task in grading]


def _summary(grades: Sequence[_Grade], *, k: int) -> EvalResult:
    n = len(grades)
    return EvalResult(
        pass_at_1=sum(grade.is_right for grade in grades) / n,
        n=n,
        k=k,
        pass_at_k=sum(grade.pass_at_k for grade in grades) / n if k > 1 else None,
        truncated=sum(grade.is_truncated for grade in grades),
        unscored=sum(grade.is_unscored for grade in grades),
        too_long=sum(grade.is_too_long for grade in grades),
        completion_tokens_mean=sum(grade.num_tokens for grade in grades) / n,
    )
