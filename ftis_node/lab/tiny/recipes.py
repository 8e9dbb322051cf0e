"""Sizes of tiny models and their training. Heads have 32 values, the smallest that vLLM serves on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ftis_node.lab.tiny.tokenizer import VOCABULARY_SIZE

Size = Literal["s", "sm", "m", "l"]


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
