r"""Equality of two mathematical answers: `math-verify` with limits for untrusted text.

An answer block is read in one of three ways:

* LaTeX with its delimiters or \boxed, inside a sentence or not: the library finds it.
* A sentence or a unit around a plain number ("72 clips", "The answer is 5"): the library takes the last number.
* Bare LaTeX or a bare expression ("(3, \frac{\pi}{2})", "x^2 + 1"): read as a whole, in dollar signs for the library.

A dozen characters keep a LaTeX parser busy for hours (`9^{9^{9^9}}`, `\sum_{k=1}^{10^9} 1/k`), inside C code that no
Python limit interrupts. The library's own time limits use SIGALRM, which needs the main thread, so they are off. An
answer beyond the limits of `expression_limits.py` is not parsed. Callers also limit the CPU time of the process
(`scoring/scorer.py`).
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
    """Return whether `answer` equals `reference`. Never raises; unreadable text does not agree."""
    if answer == reference:
        return True
    if not is_within_limits(answer):
        return False
    try:
        return bool(_library().verify(_parse_reference(reference), _parse(answer), timeout_seconds=None))
    except Exception:
        # Third-party parsers on untrusted text may raise any exception. Then the answer gets no reward.
        _log.debug("an answer could not be read", exc_info=True)
        return False


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


@lru_cache(maxsize=MAX_NUM_REFERENCES_CACHED)
def _parse_reference(reference: str) -> Any:
    return _parse(reference)


def _parse(text: str) -> Any:
    """Return the library's reading of an answer: SymPy expressions, and last the text that it read."""
    library = _library()
    text = _THOUSANDS.sub("", text)
    if not _DELIMITED.search(text) and not _is_prose_with_number(text):
        whole = library.parse(f"${text}$", [library.LatexExtractionConfig()], parsing_timeout=None)
        if any(not isinstance(reading, str) for reading in whole):
            return whole
    return library.parse(text, parsing_timeout=None)


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
