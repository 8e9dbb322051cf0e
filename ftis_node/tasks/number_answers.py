r"""Answers to a problem whose reference is a plain number: `72`, `1,450`, `-3.5`, `\$20`, `15\%`, `90^\circ`.

An answer is one number. Its notation does not count:

    1,450   1 450   1.45e3   1/2   \frac12   ½   2 1/2       thousands, exponents, fractions
    $20   20 dollars   20 cm^2   20%                         currencies, units, words; 50% equals 50 and not 0.5
    -3    minus 3   negative 3                               a sign, also in words
    2.5 hours (150 minutes)   12 of the 15 eggs              a remark, or the whole of which it is a part
    \boxed{42}   **42**   42.                                LaTeX delimiters, bold type, a full stop
    6*7 = 42   x = 42                                        equations whose sides are equal

Any other text with several different numbers is wrong, as is one with a word that changes the number (`2 million`,
`two and a half`). A number with two signs (`--7`) is wrong, too. Numbers in words (`seventy-two`) are not read.
`answers.py` evaluates a text that is an expression of numbers (`2^5`, `\sqrt{16}`). The comparison is exact: 0.333 is
not 1/3.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Final

_NUMBER = re.compile(
    r"(?<![\w.])(?:- ?)?(?:"
    r"(?P<whole>\d+ )?(?P<part>\d+/\d+)"
    r"|(?P<decimal>(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,2})?|\.\d+)"
    r")(?!,?\d)"
)
_REPLACED: Final = (
    (r"[\u2212\ufe63\uff0d]", "-"),
    (r"[\u00a0\u2007\u2009\u202f]|\\[,;: ]|\\quad|~", " "),
    (r"\\!|\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\displaystyle", ""),
    (r"\b(?i:minus|negative) (?=[\d.])", "-"),
    (r"×|\\times|·|\\cdot", "*"),
    (r"÷|\\div(?![A-Za-z])", "/"),
    (r"(?<=\d)(?:\{,\}|, )(?=\d{3}(?!\d))", ","),  # as in 1{,}000
    (r"(?<=\d)\s*(?=\\[dt]?frac)", " "),  # as in 2\frac{1}{2}
    (r"\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", r"\1\2/\3\4"),
    (r"\^\s*\{\s*\\circ\s*\}|\^?\s*\\circ(?![A-Za-z])|\\degree|°|\\?%", " "),
    (r"\\(?:text|mbox|mathrm)\s*\{([^{}\d]*)\}\^(?:\{\d\}|\d)", r" \1 "),  # units such as \text{cm}^2
    (r"\\(?:text|textbf|mbox|mathrm|mathbf)\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<=[A-Za-z])\^(?:\{\d\}|\d)|[²³]", ""),  # units such as cm^2
    (r"\\boxed\s*\{([^{}]*)\}", r" \1 "),
    (r"\\[\[\]()]|\\?\$|[€£¥₹]", " "),
    (r"(?<![\w*])(\*{1,2}|_{1,2}|`)(?=\S)(.+?)(?<=\S)\1(?![\w*])", r"\2"),  # bold, italics, code
    (r"\s*\n\s*", " ; "),
)
_CLEANING: Final = tuple((re.compile(pattern), text) for pattern, text in _REPLACED)
_UNIT = re.compile(r"\s*\\(?:text|mbox|mathrm)\s*\{[^{}\d]*\}(?:\^(?:\{\d\}|\d))?$")
_LISTED = re.compile(r"\d, \d")  # in a reference; an answer may have a space in a number
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_REMARK = re.compile(r"(?<=\d)([^()=]*?)\([^()]*\)\s*$")
_OF_ALL = re.compile(r"(?<=\d) (?:out )?of (?:the |a total of )?\d[\d,]*(?=\s|$)")
_WORDS = re.compile(r"[^\d\\^*+<>≤≥≠±|_{}\[\]()=&]*")
_LETTER = re.compile(r"(?<![A-Za-z'])[B-Zb-z](?![A-Za-z])")
_UNIT_LETTERS: Final = frozenset("CFJKLVWdghlmst")
_SCALES = re.compile(
    r"\b(?:hundreds?|thousands?|(?:m|b|tr)illions?|dozens?|half|halves|pi|sqrt|mod)\b|[π∞√]", re.IGNORECASE
)
_EXPRESSION = re.compile(r"(?:[\d\s.+\-*/^(){}!]|\\sqrt|\\[dt]?frac|\\d?binom)*\d(?:[\d\s.+\-*/^(){}!]|\\[a-z]+)*")
_NAME = re.compile(r"\\?[A-Za-z]\w*(?:\s*\([^()]*\))?")
_TWO_SIGNS = re.compile(r"(?:^|[A-Za-z:] *)- ?-(?= ?[\d.])")
_EQUALS = re.compile(r"(?<![<>!:])=+")


def without_vulgar(text: str) -> str:
    """Return `text` with 1/2 for ½."""
    return _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/"), text)


def cleaned(text: str) -> str:
    """Return `text` without the notation that does not change a number."""
    text = without_vulgar(text)
    for pattern, instead in _CLEANING:
        text = pattern.sub(instead, text)
    return text.strip().rstrip(" .;:")


def plain_number(reference: str) -> Fraction | None:
    """Return the number that a reference is, with a unit or without; None for a fraction, a list and any other one."""
    if _LISTED.search(reference):
        return None
    found = _NUMBER.fullmatch(cleaned(_UNIT.sub("", reference)))
    return _value(found) if found and found["decimal"] else None


def number_in(text: str) -> Fraction | None:
    """Return the only number of a cleaned text that has nothing but words beside it; None if there is none."""
    text = _OF_ALL.sub(" ", _REMARK.sub(r"\1", text))
    if _TWO_SIGNS.search(text):
        return None
    values = {_value(found) for found in _NUMBER.finditer(text)}
    words = _NUMBER.sub(" ", text)
    letters = {found[0] for found in _LETTER.finditer(words)}
    if len(values) != 1 or not _WORDS.fullmatch(words) or not letters <= _UNIT_LETTERS or _SCALES.search(words):
        return None
    return values.pop()


def is_expression(text: str) -> bool:
    """Return whether a cleaned text has only numbers, operators, brackets, roots and fractions."""
    return (
        not _TWO_SIGNS.match(text)
        and _EXPRESSION.fullmatch(text) is not None
        and not re.search(r"\\(?!sqrt|[dt]?frac|d?binom)", text)
    )


def sides_of(text: str) -> tuple[list[str], str]:
    """Return the sides of a chain of equations that must equal its last one, and the last side, which is the answer.

    Names (`x`, `f(2)`, `total cost`) may have any value.
    """
    *sides, last = [side.strip(" ;:").rstrip(".") for side in _EQUALS.split(text)]
    return [side for side in sides if any(map(str.isdigit, side)) and not _NAME.fullmatch(side)], last


def _value(found: re.Match[str]) -> Fraction | None:
    if found["decimal"]:
        size = Fraction(re.sub("[, ]", "", found["decimal"]))
    else:
        above, below = map(int, found["part"].split("/"))
        if not below:
            return None
        size = int(found["whole"] or 0) + Fraction(above, below)
    return -size if found[0].startswith("-") else size
