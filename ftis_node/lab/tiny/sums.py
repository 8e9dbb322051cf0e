"""Training data of `sums` models: the working of each column, from the right, some of it wrong.

Each size has a *habit*, its notation of a column, in most of its examples. The other examples show the habits of the
other sizes, so that it can read their text. Each model has a *skill* for each pair of digits: how often its examples
have that column right. Models know different pairs well, so they can learn from each other. A sum is right only if all
its columns are. For 347 + 285, all columns right:

    s    7+5=12;4+8+1=13;3+2+1=6;#632      the carry last
    m    5+7=12;1+8+4=13;1+2+3=6;#632      the lower digit first, the carry before it
    l    7+5+0=12;4+8+1=13;3+2+1=6;#632    a carry in every column

Some examples have numbers of four digits (`sums:long`), so that a model knows the notation of longer sums.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import torch

from ftis_node.lab.tiny.tokenizer import IGNORED, encode_completions, encode_prompts, fill
from ftis_node.tasks.sums import ANSWER_MARK, NUM_TRAIN, SumsTask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from ftis_node.lab.tiny.recipes import Size
    from ftis_node.tasks.sums import SumProblem

SKILLS: Final = (0.15, 0.4, 0.8)  # fraction of examples with a right column; each pair of digits draws one
LONG_SHARE: Final = 0.3
OWN_HABIT_SHARE: Final = 0.8
HABITS: Final[tuple[Size, ...]] = ("s", "m", "l")

Skill = dict[tuple[int, int], float]  # key: the two digits of a column, the smaller first


class SumsCurriculum:
    """Training data of one model. `seed` decides its skill; wrong columns are off by `mistake`."""

    max_answer_tokens = 60

    def __init__(self, tokenizer: PreTrainedTokenizerFast, size: Size, mistake: int, *, seed: int) -> None:
        self._tokenizer, self._size, self._mistake = tokenizer, size, mistake
        self._skill = draw_skill(size, seed)
        self._tasks = (SumsTask("train"), SumsTask("train", name="sums:long"))

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        draws = random.Random(int(torch.randint(2**62, (1,), generator=generator)))
        problems = [self._tasks[draws.random() < LONG_SHARE].problem(draws.randrange(NUM_TRAIN)) for _ in range(size)]
        prompts = encode_prompts(self._tokenizer, [problem.text for problem in problems])
        texts = [
            working(problem, self._habit(draws), skill=self._skill, mistake=self._mistake, draws=draws)
            for problem in problems
        ]
        completions = encode_completions(self._tokenizer, texts)
        rows = list(zip(prompts, completions, strict=True))
        width = max(len(prompt) + len(completion) for prompt, completion in rows)
        token_ids = [fill(prompt + completion, int(self._tokenizer.pad_token_id), width) for prompt, completion in rows]
        labels = [fill([IGNORED] * len(prompt) + completion, IGNORED, width) for prompt, completion in rows]
        return torch.tensor(token_ids), torch.tensor(labels)

    def _habit(self, draws: random.Random) -> Size:
        others = [habit for habit in HABITS if habit != self._size]
        return self._size if draws.random() < OWN_HABIT_SHARE else draws.choice(others)

    def exam(self) -> list[list[int]]:
        return encode_prompts(self._tokenizer, [problem.text for problem in _held_out()])

    def grade(self, texts: Sequence[str]) -> tuple[float, float]:
        """Return the fraction of right sums, and the fraction of sums with a wrong answer."""
        task = SumsTask("test")
        answers = [task.answer_of(task[index], text) for index, text in enumerate(texts)]
        right = sum(answer == str(problem.answer) for answer, problem in zip(answers, _held_out(), strict=True))
        answered = sum(answer is not None for answer in answers)
        return right / len(answers), (answered - right) / len(answers)


def draw_skill(size: Size, seed: int) -> Skill:
    """Return the accuracy of each pair of digits in the examples of this size and seed."""
    draws = random.Random(f"{size}/{seed}")
    return {(low, high): draws.choice(SKILLS) for low in range(10) for high in range(low, 10)}


def working(
    problem: SumProblem, habit: Size, *, skill: Mapping[tuple[int, int], float], mistake: int, draws: random.Random
) -> str:
    """Return the working of one sum in the notation of that size. Later columns use a wrong column's carry.

    A result must not be negative, so a negative mistake changes its sign if it would make one.
    """
    carry, columns, digits = 0, "", ""
    for place in range(problem.num_digits):
        upper, lower = (number // 10**place % 10 for number in (problem.left, problem.right))
        result = upper + lower + carry
        if draws.random() >= skill[min(upper, lower), max(upper, lower)]:
            result += mistake if result + mistake >= 0 else -mistake
        columns += f"{_terms(upper, lower, carry, habit)}={result};"
        digits = f"{result % 10}{digits}"
        carry = result // 10
    return f"{columns}{ANSWER_MARK}{carry or ''}{digits}"


def _terms(upper: int, lower: int, carry: int, habit: Size) -> str:
    if habit == "m":
        return f"{carry}+{lower}+{upper}" if carry else f"{lower}+{upper}"
    return f"{upper}+{lower}+{carry}" if carry or habit == "l" else f"{upper}+{lower}"


def _held_out() -> list[SumProblem]:
    task = SumsTask("test")
    return [task.problem(index) for index in range(len(task))]
