"""`rg:NAME`: generated problems of reasoning-gym (arXiv 2505.24760), scored by its own verifiers.

The index and a seed of the task define a problem, so every node makes the same one without a data file. Seeds of
training and test are far apart; generators with few problems (coin flips) repeat them in both splits. A completion
must have the think-answer format; then the verifier scores the answer, possibly with a fraction.

A completion can come from a peer, and some verifiers pass its answer to `eval`, directly or through SymPy's
`parse_expr`. The text is then code on the node that scores it. Such code can also return the reference answer. An
answer passes only if its evaluation can do nothing but compute.

* For `eval`: a literal (`[[1, 2], [3, 4]]`), text that is not a Python expression, or the reference itself.

* For `parse_expr`: numbers, operators, brackets, one-letter variables and elementary functions, within the limits of
  `expression_limits.py`. `Integral(f, x)` is excluded: its derivative equals any f.

The verifier of complex numbers accepts `nan` as close to everything, so it never sees `nan`. A test searches the
installed library for evaluating verifiers that are missing here.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
import warnings
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Final

from ftis_node.errors import TaskError
from ftis_node.tasks.answers import chat_prompt, final_answer, plain_text
from ftis_node.tasks.base import TaskItem, broken_grader, release_of
from ftis_node.tasks.expression_limits import is_within_limits
from ftis_node.tasks.problems import IndexedTask, Prompt

PACKAGE: Final = "reasoning-gym"
NUM_ENTRIES_CACHED: Final = 256
EVALUATED: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
PARSED: Final = frozenset({"countdown", "intermediate_integration", "simple_integration"})
NUMERIC: Final = frozenset({"complex_arithmetic"})
FUNCTIONS: Final = frozenset(
    "Abs sqrt exp log ln sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh erf pi".split()
)
MAX_ANSWER_CHARS: Final = 20_000  # the longest reference seen has 11,000: all palindromic partitions of a word
_EXPRESSION = re.compile(r"[\w\s+\-*/^().]*", re.ASCII)
_NO_NUMBER = re.compile(r"nan|inf", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def is_safe_answer(generator: str, answer: str, *, reference: str) -> bool:
    """Return whether the verifier of `generator` may see `answer`."""
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    if generator in EVALUATED:
        return answer == reference or not _is_python(answer) or _is_literal(answer)
    if generator in PARSED:
        if not is_within_limits(answer):
            return False
        words = _WORD.findall(answer)
        if generator == "countdown" and words:  # SymPy's constants would replace the given numbers
            return False
        return bool(_EXPRESSION.fullmatch(answer)) and all(len(word) == 1 or word in FUNCTIONS for word in words)
    return not (generator in NUMERIC and _NO_NUMBER.search(answer))


def _is_python(text: str) -> bool:
    """Return whether `eval` could run it; `eval` ignores the same leading white space."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # suppresses the compiler's warnings about untrusted text
            ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError):
        return False
    except (MemoryError, RecursionError):  # nested too deeply: treat it as code
        return True
    return True


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


SPLITS: Final = {"train": (1_000_000, 10_000), "test": (2_000_000_000, 1_000)}
"""First seed and length of a split. Problem i uses seed + i, so the distance of splits must exceed their length."""
_UNSTABLE: Final = "its problems differ from process to process, so no peer could make a prompt again"
REFUSED: Final = {
    "codeio": _UNSTABLE,
    "coin_flip": "its verifier takes a part of the right answer for right",
    "composite": "it needs a separate configuration: join the tasks with '+' instead",
    "game_of_life_halting": "its verifier takes every answer for right",
    "isomorphic_strings": _UNSTABLE,
    "list_functions": _UNSTABLE,
    "polynomial_multiplication": _UNSTABLE,
    "puzzle24": "its verifier does not compare the numbers of an answer with the given ones",
    "ransom_note": _UNSTABLE,
}


class ReasoningGymTask(IndexedTask):
    """One task of reasoning-gym with its default settings.

    Raises TaskError if reasoning-gym has no task `generator`, or has one that a swarm cannot use. Raises MachineError
    if the library cannot be imported.
    """

    isolate_scoring: ClassVar[bool] = True
    isolate_resolving: ClassVar[bool] = True  # a generator of the library may run for a long time

    def __init__(self, split: str, generator: str) -> None:
        _check_known(generator)
        self.name = f"rg:{generator}"
        self.split = split
        self._generator = generator
        # a group needs one problem many times, with its verifier's data
        self._entry = lru_cache(NUM_ENTRIES_CACHED)(lambda index: self._dataset[index])

    def __reduce__(self) -> tuple[type[ReasoningGymTask], tuple[str, str]]:
        return type(self), (self.split, self._generator)

    def __len__(self) -> int:
        return SPLITS[self.split][1]

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        entry = self._entry(index)
        return chat_prompt(entry["question"]), entry["answer"] or ""  # some verifiers need no reference answer

    def score(self, item: TaskItem, completion_text: str) -> float:
        """Return the verifier's score in [0, 1]; 0 if the format is broken or the verifier fails."""
        answer = final_answer(completion_text)
        if not answer or not is_safe_answer(self._generator, answer, reference=item.answer):
            return 0.0
        try:
            reward = float(self._dataset.score_answer(answer, self._entry(item.ref.index)))
        except Exception:
            # A third-party verifier on untrusted text may raise any exception. Then the answer counts as wrong.
            return 0.0
        return min(max(reward, 0.0), 1.0) if math.isfinite(reward) else 0.0

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the content of the answer block with normalized white space; None if the format is broken."""
        return plain_text(final_answer(completion_text) or "")

    @property
    def grader(self) -> str:
        return release_of(PACKAGE)

    def check_grader(self) -> None:
        """Raise MachineError if the verifier fails on a reference answer."""
        try:
            self._dataset.score_answer(self[0].answer, self._entry(0))
        except Exception as error:
            raise broken_grader(self.grader, PACKAGE, error) from error

    @cached_property
    def _dataset(self) -> Any:
        import reasoning_gym

        seed, size = SPLITS[self.split]
        return reasoning_gym.create_dataset(self._generator, seed=seed, size=size)


def _check_known(generator: str) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except Exception as error:
        raise broken_grader(release_of(PACKAGE), PACKAGE, error) from error

    if reason := REFUSED.get(generator):
        raise TaskError(f"rg:{generator} cannot be used: {reason}")
    if generator not in DATASETS:
        usable = sorted(set(DATASETS) - set(REFUSED))
        close = difflib.get_close_matches(generator, usable) or usable
        raise TaskError(f"unknown task 'rg:{generator}': reasoning-gym has {', '.join(f'rg:{name}' for name in close)}")
