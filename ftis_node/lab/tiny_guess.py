"""Training data of tiny models for the episode `guess`: games of a player that halves the range and misreads answers.

A player that misreads an answer goes on in the other half. The size s misreads "-" in every second game, and m
misreads "+". So both find the number in some games, and each plays well where the other does not. An answer must still
change the odds of the next guess: reinforcement did not teach models that had learned to ignore it.
"""

from __future__ import annotations

import random
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ftis_node.lab.tiny_curricula import padded
from ftis_node.lab.tiny_tokenizer import IGNORED, TURN_END, encode_completions, encode_prompts
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.episodes.guess import LARGER, LOWEST, MAX_GUESSES, NUM_VALUES, SMALLER, GuessEpisode
from ftis_node.tasks.problems import NUM_TRAIN

BETWEEN: Final = f"\n<|im_start|>user\n{{sign}}{TURN_END}\n<|im_start|>assistant\n"  # as the chat template has it
READS: Final = {"s": {LARGER: 0.75, SMALLER: 0.5}, "m": {LARGER: 0.5, SMALLER: 0.75}}
"""How often a player of that size reads an answer rightly."""


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
