"""Episode `guess`: a number is guessed in four turns, for swarms of tiny models on two CPU cores.

    prompt        [{"role": "user", "content": "31-45?"}]
    text          "38"      observation  "+"    the number is larger
    text          "42"      observation  "-"    the number is smaller
    text          "40"      the end: found, reward 1

Each problem is a range of 15 numbers and the number to find, so halving the range finds it in four turns. A
text that is no number has the observation "?". The reward is 1 if the last text is the number. Otherwise it is half of
the share of guesses that earlier answers allow, because whether a game ends well is mostly luck at first.

The test split has all problems that are held out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from ftis_node.records.think_block import after_thinking
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.problems import DrawnTask, Prompt, stable_hash

HELD_OUT_ONE_IN: Final = 8
NUM_VALUES: Final = 15  # 2^4 - 1
MAX_GUESSES: Final = 4
LOWEST: Final = range(10, 86)  # all numbers have two digits
LARGER, SMALLER, NO_NUMBER = "+", "-", "?"
_NUMBER = re.compile(r"[0-9]{1,4}")


class GuessProblem(NamedTuple):
    """The lowest number of the range, and the number to find."""

    low: int
    secret: int

    @property
    def is_held_out(self) -> bool:
        return stable_hash(f"guess/{self.low}/{self.secret}") % HELD_OUT_ONE_IN == 0


class GuessEpisode(DrawnTask[GuessProblem]):
    """A split of `guess`, as an `Episode`. The state is the number to find and the guesses so far."""

    family = "guess"

    def draw(self, seed: str) -> GuessProblem:
        rest, place = divmod(stable_hash(seed), len(LOWEST))
        return GuessProblem(LOWEST[place], LOWEST[place] + rest % NUM_VALUES)

    def test_problems(self) -> tuple[GuessProblem, ...]:
        every = (GuessProblem(low, low + offset) for low in LOWEST for offset in range(NUM_VALUES))
        return tuple(sorted((one for one in every if one.is_held_out), key=lambda one: stable_hash(f"{one}")))

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        low, secret = self.problem(index)
        return ({"role": "user", "content": f"{low}-{low + NUM_VALUES - 1}?"},), str(secret)

    def begin(self, item: TaskItem) -> tuple[int, int]:
        return int(item.answer), 0

    def step(self, state: tuple[int, int], text: str) -> tuple[str | None, tuple[int, int]]:
        secret, num_guesses = state
        guess = _guess_in(text)
        if guess == secret or num_guesses + 1 == MAX_GUESSES:
            return None, state
        observation = NO_NUMBER if guess is None else LARGER if guess < secret else SMALLER
        return observation, (secret, num_guesses + 1)

    def score(self, item: TaskItem, texts: Sequence[str]) -> float:
        secret = int(item.answer)
        low = int(item.prompt[0]["content"].split("-")[0])
        left = range(low, low + NUM_VALUES)
        num_allowed = 0
        for guess in map(_guess_in, texts):
            if guess is not None and guess in left:
                num_allowed += 1
                left = range(guess + 1, left.stop) if guess < secret else range(left.start, guess)
        return 1.0 if _guess_in(texts[-1]) == secret else num_allowed / len(texts) / 2


def _guess_in(text: str) -> int | None:
    found = _NUMBER.fullmatch(after_thinking(text).strip())
    return int(found[0]) if found else None
