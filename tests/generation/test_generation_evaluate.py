"""pass@1 and pass@k of a scripted generator."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import ClassVar

import numpy as np
import pytest
from generation_support import SETTINGS, completions_of, make_request, tiny_model

from ftis_node.errors import WorkerDiedError, WorkerError, WorkerTaskError
from ftis_node.generation import evaluate as evaluation
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.engines.torch_engine import TorchEngine
from ftis_node.generation.evaluate import GREEDY, answer_problems, estimate_pass_at_k, summarize
from ftis_node.models.tokenizer import RenderedPrompt
from ftis_node.records.group import Completion, CompletionStatus, FinishReason, PromptRef
from ftis_node.records.token_batch import TokenBatch
from ftis_node.tasks.base import TaskItem

RIGHT, WRONG = 1, 0


class TenProblems:
    """A task whose problem i has the text of the number i as its prompt."""

    name = "ten"
    split = "test"
    isolate_scoring: ClassVar[bool] = False

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> TaskItem:
        return TaskItem(
            ref=PromptRef("ten", "test", index), prompt=({"role": "user", "content": str(index)},), answer=""
        )


class Digits:
    """A tokenizer: number n becomes n + 1 ids of n; the text of ids is the ids."""

    eos_ids: ClassVar[frozenset[int]] = frozenset({99})

    def encode_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return list(self.render_prompt(messages).token_ids)

    def render_prompt(self, messages: Sequence[dict[str, str]]) -> RenderedPrompt:
        number = int(messages[0]["content"])
        return RenderedPrompt("", "", (number,) * (number + 1))

    def answer_texts(self, tokens: TokenBatch, finish_reasons: object, *, opening: str) -> list[str]:
        return [" ".join(map(str, ids)) for ids in tokens.ids_of_each()]


class LastTokenScorer:
    """A scorer by the last token: 1 has reward 1, 5 has reward 0.5, 9 cannot be scored, others have reward 0."""

    async def score(
        self, item: TaskItem, texts: Sequence[str], *, cost: object = None
    ) -> list[tuple[float, CompletionStatus]]:
        return [self.score_one(text.split()[-1]) for text in texts]

    def is_episode(self, item: TaskItem) -> bool:
        return False

    def score_one(self, last: str) -> tuple[float, CompletionStatus]:
        status = CompletionStatus.UNSCORED if last == "9" else CompletionStatus.SCORED
        return {"1": 1.0, "5": 0.5}.get(last, 0.0), status


@dataclass
class Scripted:
    """A generator. Greedy: right answers to problems 0 to 3. Sampled: the first `problem` completions are right."""

    deaths: int = 0
    death: WorkerError = field(default_factory=lambda: WorkerDiedError("killed"))
    calls: list[tuple[int, int, float, int]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    greedy: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(4), RIGHT))

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        if self.deaths:
            self.deaths -= 1
            raise self.death
        problem, num_completions = request.prompt_ids[0], request.num_completions
        assert request.eos_ids == Digits.eos_ids
        self.calls.append((problem, num_completions, request.sampling.temperature, request.max_tokens))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if request.sampling.temperature == 0:
            last_ids = [self.greedy.get(problem, WRONG)]
        else:
            last_ids = [RIGHT] * problem + [WRONG] * (num_completions - problem)
        reason = FinishReason.LENGTH if problem == 8 else FinishReason.STOP
        completions = tuple(
            Completion(np.array([7, last], dtype=np.int32), np.zeros(2, dtype=np.float32), reason) for last in last_ids
        )
        return GenerationResult.from_completions(completions)


async def grade(generator: Scripted, **options: object) -> object:
    given = {"limit": 10, "scorer": LastTokenScorer(), "completion_limit": lambda length: 20 - length, **options}
    return summarize(await answer_problems(generator, TenProblems(), Digits(), **given), k=given.get("k", 1))


async def test_greedy_pass_at_1_over_the_first_problems():
    generator, reported = Scripted(), []
    result = await grade(generator, limit=8, on_progress=lambda done, of: reported.append((done, of)))
    assert (result.pass_at_1, result.n, result.pass_at_k) == (0.5, 8, None)
    assert sorted(generator.calls) == [(problem, 1, 0.0, 19 - problem) for problem in range(8)]
    assert reported == [(done, 8) for done in range(1, 9)]
    assert (await grade(Scripted(), limit=1000)).n == 10


async def test_failures_are_counted_and_half_a_reward_is_a_wrong_answer():
    generator = Scripted(greedy={0: 1, 1: 5, 2: 9})
    result = await grade(generator, completion_limit=lambda length: 9 - length)
    assert result.pass_at_1 == 0.1
    assert (result.unscored, result.too_long, result.truncated) == (1, 2, 0)
    assert (await grade(Scripted())).truncated == 1
    assert (await grade(Scripted())).completion_tokens_mean == 2.0


async def test_pass_at_k_by_samples():
    generator = Scripted()
    result = await grade(generator, limit=3, k=2)
    # 0, 1 and 2 of 4 are right: two draws hold a right one with probability 0, 1/2 and 1 - 1/6
    assert result.pass_at_k == pytest.approx((0 + 1 / 2 + 5 / 6) / 3)
    assert result.pass_at_1 == 1.0
    assert [call[1:3] for call in sorted(generator.calls)] == [(1, 0.0), (4, 1.0)] * 3


@pytest.mark.parametrize("num_samples", [1, 4, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(num_samples):
    for num_right in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            draws = list(combinations([True] * num_right + [False] * (num_samples - num_right), k))
            share = sum(map(any, draws)) / len(draws)
            estimate = estimate_pass_at_k(num_samples=num_samples, num_right=num_right, k=k)
            assert estimate == pytest.approx(share, abs=1e-12)


async def test_problems_in_flight_are_bounded(monkeypatch):
    monkeypatch.setattr(evaluation, "PROBLEMS_IN_FLIGHT", 3)
    generator = Scripted()
    await grade(generator)
    assert generator.most_in_flight == 3


@pytest.mark.parametrize("death", [WorkerDiedError("killed"), WorkerTaskError("the engine was closed, or failed")])
async def test_a_problem_is_tried_three_times_if_the_worker_dies(death, monkeypatch):
    monkeypatch.setattr(evaluation, "RETRY_PAUSE_S", 0.01)
    assert (await grade(Scripted(deaths=2, death=death), limit=1)).pass_at_1 == 1.0
    with pytest.raises(type(death)):
        await grade(Scripted(deaths=3, death=death), limit=1)


async def test_answers_end_at_the_given_eos_ids():
    engine = TorchEngine(tiny_model(), SETTINGS)
    try:
        request = make_request([1, 1], num_completions=1, max_tokens=5, sampling=GREEDY, eos_ids=frozenset())
        (whole,) = completions_of(await engine.generate(request))
        problem = TenProblems()[1]
        options = {"scorer": LastTokenScorer(), "limit": 1, "completion_limit": lambda num_prompt_tokens: 5}
        ends = {int(whole.token_ids[0])}
        (answered,) = await answer_problems(engine, [problem], Digits(), **options, eos_ids=ends)
        (unended,) = await answer_problems(engine, [problem], Digits(), **options, eos_ids=())
    finally:
        await engine.close()
    assert answered.greedy is not None and unended.greedy is not None
    assert (answered.greedy.num_tokens, unended.greedy.num_tokens) == (1, 5)
    assert unended.greedy.text == " ".join(map(str, whole.token_ids.tolist()))
