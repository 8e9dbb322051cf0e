r"""Answers in completions: the chat format that asks for them, their equality, and their form for majority votes.

A completion that breaks the format scores 0, because models learn to write whatever a looser rule accepts.

If the reference is a plain number, `number_answers.py` reads the answer. Any other reference needs `math-verify`, with
limits for untrusted text. The library reads an answer in one of three ways:

* LaTeX with its delimiters or \boxed, inside a sentence or not: the library finds it.
* A sentence or a unit around a plain number ("72 clips", "The answer is 5"): the library takes the last number.
* Bare LaTeX or a bare expression ("(3, \frac{\pi}{2})", "x^2 + 1"): read as a whole, in dollar signs for the library.

In an equation without a list, all sides must be equal: the library would take the last one alone. Its own time limits
use SIGALRM, which needs the main thread. `expression_limits.py` and the limits of the scoring process replace them.

Votes compare the task's `answer_of`, or else the whole text: the reward would reveal the right answer.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Final

from ftis_node.records.think_block import ANSWER_TAGS
from ftis_node.tasks.base import ChatMessage, Task, TaskItem, asked, broken_grader, leaves, release_of
from ftis_node.tasks.expression_limits import MAX_CHARS, is_within_limits
from ftis_node.tasks.number_answers import cleaned, is_expression, number_in, plain_number, sides_of, without_vulgar

log = logging.getLogger(__name__)

SYSTEM_PROMPT = (
    "You are an assistant that solves the user's problem. First reason about it step by step, then state the result. "
    "Write the reasoning inside <think> </think> tags and after it only the final answer inside <answer> </answer> "
    "tags, that is: <think> your reasoning </think> <answer> your final answer </answer>"
)

MAX_NUM_REFERENCES_CACHED: Final = 4096
GRADER_PACKAGES: Final = ("latex2sympy2-extended", "math-verify", "sympy")
PROBES: Final = ((r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", True), ("72", "72.0 clips", True), ("x + 1", "$x$", False))

_FORMAT = re.compile(r"\s*<think>.*</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)
_NUMBER = re.compile(r"([+-]?)0*(\d+)(?:\.(\d*?)0*)?")
_DRESS = re.compile(r"\\boxed\{([^{}]*)\}|\$([^$]*)\$|\\\(([^()]*)\\\)")

_DELIMITED = re.compile(r"\$.+\$|\\\(|\\\[|\\boxed", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|\{[a-z]*matrix\}")
_PROSE = re.compile(r"(?<![A-Za-z])(?!(?:sqrt|frac|sin|cos|tan|log|exp|and)\b)[A-Za-z]{3,}")
_THOUSANDS = re.compile(r"(?<=\d)(?:,?\\[,!;: ]|\{,\})(?=\d{3})")
_PERCENT = re.compile(r"\\?%")
_BOLD = re.compile(r"\s*\*\*([^*]+)\*\*\s*")
_ENVIRONMENT = re.compile(r"\\begin\{.*?\\end\{", re.DOTALL)
_LIST = re.compile(r",|;|\\cup|\\text|\b(?:and|or)\b")
_COMMAS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def chat_prompt(problem: str) -> tuple[ChatMessage, ...]:
    """Return the messages that ask for `problem` in this format."""
    return asked(problem, SYSTEM_PROMPT)


def final_answer(completion_text: str) -> str | None:
    """Return the stripped content of the answer block; None if the format is broken."""
    if any(completion_text.count(tag) != 1 for tag in ANSWER_TAGS):
        return None
    found = _FORMAT.fullmatch(completion_text)
    return found["answer"].strip() if found else None


def answers_agree(reference: str, answer: str) -> bool:
    """Return whether `answer` equals `reference`. Never raises; unreadable text does not agree."""
    if answer == reference:
        return True
    if not is_within_limits(answer) or answer.count("\\boxed") > 1:
        return False
    if (words := _TEXT.fullmatch(reference)) and _folded(words[1]) == _folded(answer):
        return True
    try:
        number = _plain_reference(reference)
        return _is_math(reference, answer) if number is None else _is_number(number, answer)
    except Exception:
        # Third-party parsers on untrusted text may raise any exception. Then the answer gets no reward.
        log.debug("an answer could not be read", exc_info=True)
        return False


def _folded(text: str) -> str:
    return " ".join(text.casefold().rstrip(" .").split())


def _is_number(reference: Fraction, answer: str) -> bool:
    sides, last = sides_of(cleaned(answer))
    if not is_expression(last) and number_in(last) is None:
        return False
    return all(_side_equals(reference, side) for side in (*sides, last))


def _side_equals(reference: Fraction, side: str) -> bool:
    number = number_in(side)
    return _equal(_parse_reference(str(reference)), _parse(side)) if number is None else number == reference


def _is_math(reference: str, answer: str) -> bool:
    reference, answer = (_PERCENT.sub("", without_vulgar(text)).rstrip(" .") for text in (reference, answer))
    answer = _BOLD.sub(r"\1", answer) if _BOLD.fullmatch(answer) else answer
    if len(_lines(answer)) > 1:
        return False
    answer = " ".join(answer.split())
    sides, last = sides_of(answer)
    if (
        "=" not in reference
        and not _LIST.search(answer)
        and any(not _equal(_parse(last), _parse(side)) for side in sides)
    ):
        return False
    return _equal(_parse_reference(reference), _parse(answer))


def _equal(reference: Any, answer: Any) -> bool:
    return bool(_library().verify(reference, answer, timeout_seconds=None))


def _lines(answer: str) -> list[str]:
    """Return the lines with text. An environment, such as a matrix, is one line."""
    flat = _ENVIRONMENT.sub(lambda found: found[0].replace("\n", " "), answer)
    return [line for line in flat.splitlines() if line.strip(" \t$\\[]")]


def math_releases() -> str:
    """Return the releases of the packages that decide whether two answers agree."""
    return ", ".join(map(release_of, GRADER_PACKAGES))


def check_math() -> None:
    """Raise MachineError if these packages do not grade three known answers here.

    `math_verify.parse` hides the errors of the LaTeX parser, so the parser is also called by itself.
    """
    try:
        from latex2sympy2_extended import latex2sympy

        latex2sympy(PROBES[0][0])
        for reference, answer, expected in PROBES:
            if answers_agree(reference, answer) != expected:
                raise ValueError(f"{answer} {'does not equal' if expected else 'equals'} {reference}")
    except Exception as error:
        raise broken_grader(math_releases(), "math-verify", error) from error


def plain_answer(answer: str) -> str:
    r"""Return `answer` in the form for votes: a number alone has one notation.

    `$72$`, `\boxed{72}`, `+72.00` and `072` become `72`, `1{,}000` and `1,000` become `1000`. Anything else keeps its
    words and symbols, with single spaces. No parser runs: `1/2` and `0.5` stay different. Never raises.
    """
    text = " ".join(answer.split())
    if len(text) > MAX_CHARS:
        return text
    if dressed := _DRESS.fullmatch(text):
        text = next(part for part in dressed.groups() if part is not None).strip()
    number = _NUMBER.fullmatch(_COMMAS.sub("", _THOUSANDS.sub("", text)))
    if number is None:
        return text
    sign, whole, fraction = number.groups()
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if sign == "-" and value != "0" else value


def _parse(text: str) -> Any:
    """Return the library's reading of an answer: SymPy expressions, and last the text that it read."""
    library = _library()
    text = _THOUSANDS.sub("", text)
    if not _DELIMITED.search(text) and not _is_prose_with_number(text):
        whole = library.parse(f"${text}$", [library.LatexExtractionConfig()], parsing_timeout=None)
        if any(not isinstance(reading, str) for reading in whole):
            return whole
    return library.parse(text, parsing_timeout=None)


_parse_reference = lru_cache(maxsize=MAX_NUM_REFERENCES_CACHED)(_parse)
_plain_reference = lru_cache(maxsize=MAX_NUM_REFERENCES_CACHED)(plain_number)


def _is_prose_with_number(text: str) -> bool:
    """Return whether the text is a sentence, or a number with a unit, rather than a formula."""
    plain = _COMMAND.sub(" ", text)
    return bool(_PROSE.search(plain)) and any(char.isdigit() for char in plain)


@cache
def _library() -> Any:
    """Return math-verify, imported on first use, which takes a second. Its warning about time limits is silenced."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    import math_verify

    return math_verify


def answer_in(task: Task, item: TaskItem, completion_text: str) -> str | None:
    """Return the answer of `completion_text` to `item`, a problem of `task`; None if it has none.

    Never raises: an exception of a plug-in counts as no answer.
    """
    leaf = next((one for one in leaves(task) if one.name == item.ref.task), task)
    answer_of = getattr(leaf, "answer_of", None)
    if answer_of is None:
        return plain_text(completion_text)
    try:
        answer = answer_of(item, completion_text)
    except Exception as error:  # third-party code on untrusted text
        log.warning("%s: no answer could be read: %r", item.ref, error)
        return None
    return answer if isinstance(answer, str) and answer else None


def plain_text(text: str) -> str | None:
    """Return `text` with single spaces between its words; None if it has no words."""
    return " ".join(text.split()) or None
