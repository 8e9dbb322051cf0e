r"""Whether two mathematical answers are equal: `math-verify` with bounds for hostile text.

Three ways to read an answer block, for what models write:

* LaTeX with its delimiters or \boxed, inside a sentence or not: found by the library;
* a sentence or a unit around a plain number ("72 clips", "The answer is 5"): the last number, found by the library;
* bare LaTeX or a bare expression ("(3, \frac{\pi}{2})", "x^2 + 1"): read as a whole, which the library only does
  between dollar signs.

The library's own time limits use SIGALRM, which works in a main thread alone, and they are off here: a parser for LaTeX
can be kept busy for hours by a dozen characters (`9^{9^{9^9}}`, `\sum_{k=1}^{10^9} 1/k`), inside C code that no Python
limit interrupts. An answer beyond the limits of `expression_limits.py` is not parsed. What still takes long meets the
other bound: callers run this in a process with a limit of processor time (`scoring/scorer.py`).
"""

from __future__ import annotations

import logging
import re
from functools import cache, lru_cache
from typing import Any, Final

from ftis_node.tasks.math.expression_limits import MAX_CHARS, is_within_limits

MAX_NUM_REFERENCES_CACHED: Final = 4096

_log = logging.getLogger(__name__)

_NUMBER = re.compile(r"([+-]?)0*(\d+)(?:\.(\d*?)0*)?")
_DRESS = re.compile(r"\\boxed\{([^{}]*)\}|\$([^$]*)\$|\\\(([^()]*)\\\)")

_DELIMITED = re.compile(r"\$.+\$|\\\(|\\\[|\\boxed", re.DOTALL)
_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|\{[a-z]*matrix\}")
_PROSE = re.compile(r"(?<![A-Za-z])(?!(?:sqrt|frac|sin|cos|tan|log|exp|and)\b)[A-Za-z]{3,}")
_THOUSANDS = re.compile(r"(?<=\d)(?:,?\\[,!;: ]|\{,\})(?=\d{3})")
_COMMAS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def answers_agree(reference: str, answer: str) -> bool:
    """Whether `answer` equals `reference`, both as text. Never raises; what cannot be read does not agree."""
    if answer == reference:
        return True
    if not is_within_limits(answer):
        return False
    try:
        return bool(_library().verify(_parse_reference(reference), _parse(answer), timeout_seconds=None))
    except Exception:
        # Third-party parsers over arbitrary text: any of them may raise anything, and none of it earns a reward.
        _log.debug("an answer could not be read", exc_info=True)
        return False


def plain_answer(answer: str) -> str:
    r"""`answer` in the form in which models vote: a number alone is one number however it is written.

    `$72$`, `\boxed{72}`, `+72.00` and `072` are `72`, `1{,}000` and `1,000` are `1000`; anything else keeps its words
    and symbols, with single spaces. No parser is asked: `1/2` and `0.5` stay two answers. Never raises.
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


@lru_cache(maxsize=MAX_NUM_REFERENCES_CACHED)
def _parse_reference(reference: str) -> Any:
    return _parse(reference)


def _parse(text: str) -> Any:
    """What the library makes of an answer: expressions of SymPy, and last the text that was read."""
    library = _library()
    text = _THOUSANDS.sub("", text)
    if not _DELIMITED.search(text) and not _is_prose_with_number(text):
        whole = library.parse(f"${text}$", [library.LatexExtractionConfig()], parsing_timeout=None)
        if any(not isinstance(reading, str) for reading in whole):
            return whole
    return library.parse(text, parsing_timeout=None)


def _is_prose_with_number(text: str) -> bool:
    """A sentence, or a number with a unit in plain letters, rather than a formula."""
    plain = _COMMAND.sub(" ", text)
    return bool(_PROSE.search(plain)) and any(char.isdigit() for char in plain)


@cache
def _library() -> Any:
    """math-verify, loaded on first use: it takes a second. It warns about the missing time limits, which we know."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    import math_verify

    return math_verify
