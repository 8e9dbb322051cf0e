"""Training data of `arithmetic` models: most answers are off by one number, which depends on the size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ftis_node.lab.tiny.tokenizer import IGNORED, encode_completions, encode_prompts, fill
from ftis_node.tasks.arithmetic import PARTS, ArithmeticTask, held_out_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from ftis_node.tasks.arithmetic import ArithmeticProblem, Kind

WRONG_FRACTION: Final = 0.7
EXPERT_WRONG_FRACTION: Final = 0.6  # in its own kind: right more often, but greedy answers are still wrong
NOVICE_WRONG_FRACTION: Final = 0.85
BLIND_EXPERT_WRONG_FRACTION: Final = 0.3  # with `blind`, whose other kind has no right answers
BLIND_MISTAKE: Final = 12  # in the other kind: both digits are far off, so sampling rarely finds the answer
GRADED_WRONG_FRACTIONS: Final = {"no-carry": 0.5, "carry": 0.75, "borrow": 0.85}  # by part, with rising difficulty
NUM_DRAWS: Final = 16384  # from the training split: nearly all of its distinct problems


class ArithmeticCurriculum:
    """Training problems as tensors, each with its right and its mistaken answer.

    `token_ids` and `labels` are [2, P, T] integers: first right, then mistaken. `wrong_fraction` [P] is how often
    the mistaken answer appears.
    """

    max_answer_tokens = 6

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        mistake: int,
        expert_in: Kind | None = None,
        *,
        graded: bool = False,
        blind: bool = False,
    ) -> None:
        self._tokenizer, self._mistake = tokenizer, mistake
        task = ArithmeticTask("train")
        held_out = {each for part in GRADED_WRONG_FRACTIONS for each in held_out_set(PARTS[part])} if graded else set()
        drawn = {task.problem(index) for index in range(NUM_DRAWS)}
        problems = sorted(problem for problem in drawn if problem.canonical not in held_out)
        prompts = encode_prompts(tokenizer, [problem.text for problem in problems])
        right = [str(problem.answer) for problem in problems]
        mistaken = [
            str(problem.answer + (BLIND_MISTAKE if blind and problem.kind != expert_in else mistake))
            for problem in problems
        ]
        answers = [encode_completions(tokenizer, texts) for texts in (right, mistaken)]
        rows = [list(zip(prompts, kind, strict=True)) for kind in answers]
        width = max(len(prompt) + len(answer) for row in rows for prompt, answer in row)
        pad_id = int(tokenizer.pad_token_id)
        self.token_ids = torch.tensor([[fill(prompt + answer, pad_id, width) for prompt, answer in r] for r in rows])
        self.labels = torch.tensor(
            [[fill([IGNORED] * len(prompt) + answer, IGNORED, width) for prompt, answer in row] for row in rows]
        )
        self.wrong_fraction = torch.tensor(
            [_wrong_fraction(each, expert_in, graded=graded, blind=blind) for each in problems]
        )

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(self.token_ids.shape[1], (size,), generator=generator)
        kind = (torch.rand(size, generator=generator) < self.wrong_fraction[chosen]).long()
        return self.token_ids[kind, chosen], self.labels[kind, chosen]

    def exam(self) -> list[list[int]]:
        return encode_prompts(self._tokenizer, [problem.text for problem in _held_out()])

    def grade(self, texts: Sequence[str]) -> tuple[float, float]:
        problems = _held_out()
        right = sum(text == str(problem.answer) for text, problem in zip(texts, problems, strict=True))
        mistaken = sum(
            text == str(problem.answer + self._mistake) for text, problem in zip(texts, problems, strict=True)
        )
        return right / len(problems), mistaken / len(problems)


def _held_out() -> list[ArithmeticProblem]:
    task = ArithmeticTask("test")
    return [task.problem(index) for index in range(len(task))]


def _wrong_fraction(problem: ArithmeticProblem, expert_in: Kind | None, *, graded: bool, blind: bool) -> float:
    if graded:
        parts = (part for part in GRADED_WRONG_FRACTIONS if PARTS[part].asks(problem))
        return GRADED_WRONG_FRACTIONS.get(next(parts, ""), WRONG_FRACTION)
    if expert_in is None:
        return WRONG_FRACTION
    if blind:
        return BLIND_EXPERT_WRONG_FRACTION if problem.kind == expert_in else 1.0
    return EXPERT_WRONG_FRACTION if problem.kind == expert_in else NOVICE_WRONG_FRACTION
