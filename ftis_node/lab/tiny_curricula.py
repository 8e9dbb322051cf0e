"""Sizes of tiny models, and their training data for `arithmetic`, `sums` and `guess`. Many answers are wrong.

Heads have 32 values, the smallest that vLLM serves on a CPU.

The working of `sums` has each column, from the right. Each size has a *habit*, its notation of a column, in most of its
examples. The other examples show the habits of the other sizes, so that it can read their text. Each model has a
*skill* for each pair of digits: how often its examples have that column right. Models know different pairs well, so
they can learn from each other. A sum is right only if all its columns are. For 347 + 285, all columns right:

    s    7+5=12;4+8+1=13;3+2+1=6;#632      the carry last
    m    5+7=12;1+8+4=13;1+2+3=6;#632      the lower digit first, the carry before it
    l    7+5+0=12;4+8+1=13;3+2+1=6;#632    a carry in every column

Some examples have numbers of four digits (`sums:long`), so that a model knows the notation of longer sums.

The examples of `guess` are games of a player that halves the range and misreads answers. A player that misreads one
goes on in the other half. The size s misreads "-" in every second game, and m misreads "+". So both find the number in
some games, and each plays well where the other does not. An answer must still change the odds of the next guess:
reinforcement did not teach models that had learned to ignore it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from ftis_node.lab.tiny_tokenizer import IGNORED, TURN_END, VOCABULARY_SIZE, encode_completions, encode_prompts
from ftis_node.tasks.arithmetic import PARTS, ArithmeticProblem, ArithmeticTask, Kind, held_out_set
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.episodes.guess import LARGER, LOWEST, MAX_GUESSES, NUM_VALUES, SMALLER, GuessEpisode
from ftis_node.tasks.problems import NUM_TRAIN
from ftis_node.tasks.sums import ANSWER_MARK, SumProblem, SumsTask

SKILLS: Final = (0.15, 0.4, 0.8)  # fraction of examples with a right column; each pair of digits draws one
LONG_SHARE: Final = 0.3
OWN_HABIT_SHARE: Final = 0.8
HABITS: Final[tuple[Size, ...]] = ("s", "m", "l")
Skill = dict[tuple[int, int], float]  # key: the two digits of a column, the smaller first
WRONG_FRACTION: Final = 0.7
EXPERT_WRONG_FRACTION: Final = 0.6  # in its own kind: right more often, but greedy answers are still wrong
NOVICE_WRONG_FRACTION: Final = 0.85
BLIND_EXPERT_WRONG_FRACTION: Final = 0.3  # with `blind`, whose other kind has no right answers
BLIND_MISTAKE: Final = 12  # in the other kind: both digits are far off, so sampling rarely finds the answer
GRADED_WRONG_FRACTIONS: Final = {"no-carry": 0.5, "carry": 0.75, "borrow": 0.85}  # by part, with rising difficulty
NUM_DRAWS: Final = 16384  # from the training split: nearly all of its distinct problems
BETWEEN: Final = f"\n<|im_start|>user\n{{sign}}{TURN_END}\n<|im_start|>assistant\n"  # as the chat template has it
READS: Final = {"s": {LARGER: 0.75, SMALLER: 0.5}, "m": {LARGER: 0.5, SMALLER: 0.75}}
"""How often a player of that size reads an answer rightly."""
Size = Literal["s", "sm", "m", "l"]


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
        task = ArithmeticTask("train")
        held_out = {each for part in GRADED_WRONG_FRACTIONS for each in held_out_set(PARTS[part])} if graded else set()
        drawn = {task.problem(index) for index in range(NUM_DRAWS)}
        problems = sorted(problem for problem in drawn if problem.canonical not in held_out)
        right = [str(problem.answer) for problem in problems]
        mistaken = [
            str(problem.answer + (BLIND_MISTAKE if blind and problem.kind != expert_in else mistake))
            for problem in problems
        ]
        made = _examples(tokenizer, [problem.text for problem in problems] * 2, right + mistaken)
        self.token_ids, self.labels = (each.view(2, len(problems), -1) for each in made)
        self.wrong_fraction = torch.tensor(
            [_wrong_fraction(each, expert_in, graded=graded, blind=blind) for each in problems]
        )

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return token ids and labels of `size` examples, both [size, T] int64; IGNORED outside the completion."""
        chosen = torch.randint(self.token_ids.shape[1], (size,), generator=generator)
        kind = (torch.rand(size, generator=generator) < self.wrong_fraction[chosen]).long()
        return self.token_ids[kind, chosen], self.labels[kind, chosen]


def _wrong_fraction(problem: ArithmeticProblem, expert_in: Kind | None, *, graded: bool, blind: bool) -> float:
    if graded:
        parts = (part for part in GRADED_WRONG_FRACTIONS if PARTS[part].asks(problem))
        return GRADED_WRONG_FRACTIONS.get(next(parts, ""), WRONG_FRACTION)
    if expert_in is None:
        return WRONG_FRACTION
    if blind:
        return BLIND_EXPERT_WRONG_FRACTION if problem.kind == expert_in else 1.0
    return EXPERT_WRONG_FRACTION if problem.kind == expert_in else NOVICE_WRONG_FRACTION


class SumsCurriculum:
    """Like `ArithmeticCurriculum`. `seed` decides the model's skill; wrong columns are off by `mistake`."""

    max_answer_tokens = 60

    def __init__(self, tokenizer: PreTrainedTokenizerFast, size: Size, mistake: int, *, seed: int) -> None:
        self._tokenizer, self._size, self._mistake = tokenizer, size, mistake
        self._skill = draw_skill(size, seed)
        self._tasks = (SumsTask("train"), SumsTask("train", "long"))

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        draws = random.Random(int(torch.randint(2**62, (1,), generator=generator)))
        problems = [self._tasks[draws.random() < LONG_SHARE].problem(draws.randrange(NUM_TRAIN)) for _ in range(size)]
        texts = [
            working(problem, self._habit(draws), skill=self._skill, mistake=self._mistake, draws=draws)
            for problem in problems
        ]
        return _examples(self._tokenizer, [problem.text for problem in problems], texts)

    def _habit(self, draws: random.Random) -> Size:
        others = [habit for habit in HABITS if habit != self._size]
        return self._size if draws.random() < OWN_HABIT_SHARE else draws.choice(others)


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


def _examples(
    tokenizer: PreTrainedTokenizerFast, questions: Sequence[str], answers: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return the token ids and labels of answered questions, both [N, T] int64; IGNORED outside the answers."""
    pairs = zip(encode_prompts(tokenizer, questions), encode_completions(tokenizer, answers), strict=True)
    return padded(tokenizer, [(prompt + answer, [IGNORED] * len(prompt) + answer) for prompt, answer in pairs])


def padded(tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Return the rows of token ids and labels as two [N, T] tensors."""
    ids, labels = ([torch.tensor(row[part]) for row in rows] for part in (0, 1))
    pad_id = float(tokenizer.pad_token_id or 0)
    return pad_sequence(ids, True, pad_id), pad_sequence(labels, True, IGNORED)


class GuessCurriculum:
    """Like `ArithmeticCurriculum`, with whole games as examples. A label is a guess or its end."""

    max_answer_tokens = 4

    def __init__(self, tokenizer: PreTrainedTokenizerFast, size: str) -> None:
        self._tokenizer, self._reads = tokenizer, READS[size]
        self._train = GuessEpisode()
        contents = [f"{low}-{low + NUM_VALUES - 1}?" for low in LOWEST]
        self._prompts = dict(zip(LOWEST, encode_prompts(tokenizer, contents), strict=True))
        guesses = range(LOWEST.start, LOWEST.stop + NUM_VALUES)
        self._guesses = dict(zip(guesses, encode_completions(tokenizer, list(map(str, guesses))), strict=True))
        self._between = {sign: self._encode(BETWEEN.format(sign=sign)) for sign in (LARGER, SMALLER)}

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        draws = random.Random(int(torch.randint(2**62, (1,), generator=generator)))
        return padded(
            self._tokenizer, [self._game(self._train[draws.randrange(NUM_TRAIN)], draws) for _ in range(size)]
        )

    def _game(self, item: TaskItem, draws: random.Random) -> tuple[list[int], list[int]]:
        """Return the token ids and labels of one game."""
        low = int(item.prompt[0]["content"].split("-")[0])
        left = range(low, low + NUM_VALUES)
        ids = self._prompts[low]
        labels = [IGNORED] * len(ids)
        state = self._train.begin(item)
        for _ in range(MAX_GUESSES):
            guess = left[len(left) // 2]
            ids, labels = ids + self._guesses[guess], labels + self._guesses[guess]
            answer, state = self._train.step(state, str(guess))
            if answer is None:
                break
            is_larger = (answer == LARGER) is (draws.random() < self._reads[answer])
            left = (range(guess + 1, left.stop) if is_larger else range(left.start, guess)) or left
            ids, labels = ids + self._between[answer], labels + [IGNORED] * len(self._between[answer])
        return ids, labels

    def _encode(self, text: str) -> list[int]:
        ids: Any = self._tokenizer.encode(text, add_special_tokens=False)
        return [int(token) for token in ids]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape and training of one size, and the offset of its wrong results."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    initializer_range: float
    num_steps: int
    mistake: int
    matrix_learning_rate: float
    vector_learning_rate: float = 4e-3

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; the embedding is also the output head."""
        hidden, head_size = self.hidden_size, self.hidden_size // self.num_heads
        keys = self.num_key_value_heads * head_size
        attention = hidden * (hidden + 1) + 2 * keys * (hidden + 1) + hidden * hidden  # no bias on the output
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        return VOCABULARY_SIZE * hidden + self.num_layers * layer + hidden


# Sizes for `arithmetic`.
RECIPES: Final[dict[Size, Recipe]] = {
    "s": Recipe(96, 128, 2, 3, 1, initializer_range=0.06, num_steps=360, mistake=10, matrix_learning_rate=0.015),
    # The mean size: one s, one sm and one m have about as many parameters as three sm.
    "sm": Recipe(128, 240, 3, 4, 2, initializer_range=0.04, num_steps=300, mistake=10, matrix_learning_rate=0.02),
    "m": Recipe(128, 512, 3, 4, 2, initializer_range=0.04, num_steps=300, mistake=1, matrix_learning_rate=0.02),
}

# Sizes for `sums`: 0.21, 0.80 and 3.1 million parameters.
SUMS_RECIPES: Final[dict[Size, Recipe]] = {
    "s": Recipe(96, 192, 2, 3, 1, initializer_range=0.06, num_steps=400, mistake=1, matrix_learning_rate=0.015),
    "m": Recipe(128, 512, 3, 4, 2, initializer_range=0.04, num_steps=300, mistake=-1, matrix_learning_rate=0.02),
    "l": Recipe(224, 896, 4, 7, 1, initializer_range=0.03, num_steps=160, mistake=1, matrix_learning_rate=0.02),
}
