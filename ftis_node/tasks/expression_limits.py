r"""Limits of a mathematical answer, checked before any parser or SymPy sees it.

A dozen characters can keep a computer-algebra system busy for hours, such as `99^{999!}`. An answer beyond a limit is
scored 0, so that a model that writes it loses no group. No limit is a time, so all nodes give the same text the same
reward. The time and memory of the scoring process (`scorer.py`) bound all other cases. The longest reference answer of
MATH-500 has 53 characters, depth 2 and 8 powers.
"""

from __future__ import annotations

import re
from typing import Final

MAX_CHARS: Final = 500
MAX_DEPTH: Final = 8  # nested brackets, including braces of commands
MAX_BRACKETS: Final = 48  # opening brackets of all kinds
MAX_POWERS: Final = 24  # exponents
MAX_FUNCTIONS: Final = 6  # `\sin`, `\log`, ... and `!`
MAX_ROOTS: Final = 6
MAX_BARS: Final = 8  # bars, floor signs and other pairs that are not brackets
MAX_CELLS: Final = 30  # of matrices
FORBIDDEN: Final = re.compile(
    # sums, products, integrals, limits and operations on matrices: an answer must be evaluated
    r"\\(?:sum|prod|coprod|i*int|oint|idotsint|lim|limsup|liminf|bigcup|bigcap|det|xrightarrow|partial)(?![A-Za-z])"
    r"|[∑∏∫]"
    r"|(?<![A-Za-z])(?:eye|zeros|ones|cols|rows|diag|norm|rank|trace|rref|hstack|vstack|orthogonalize|nullspace"
    r"|diagonalize|eigenval\w*|eigenvect\w*|svd)\s*\}?\s*(?:\\left|\\!)?\s*[({\[]"
    r"|\\d?frac\s*\{\s*(?:d|\\mathrm\s*\{\s*d\s*\})\s*(?:\^[^{}]*|\^\{[^{}]*\})?\}"  # derivatives
    r"|\d{41}"
    r"|\\sqrt\s*\[[^\]]*\d{3}"  # roots of degree 100 and above
    r"|\d{4}[\s)}]*!|![\s)}]*!"  # factorials of large numbers and of factorials
    r"|\\[dt]?binom[\s{]*\d{4}"
    r"|(?:\^|(?<=[\w)])\*\*)[\s{(+-]*\d{5}"  # exponents from 10,000 on
    r"|\^\s*(?:\{[^{}]*|\([^()]*)(?:\d\s*\^|\^[\s{(+-]*\d\d|!)"  # powers of numbers and factorials in an exponent
    r"|\d[\s)}]*(?:\^|\*\*)\s*(?:\{[^{}]*\}|\([^()]*\)|[\w.]+)[\s)}]*(?:\^|\*\*)"  # powers of powers of a number
    r"|matrix\}[^a-zA-Z]*(?:\\right)?[^a-zA-Z]*\^"  # powers of matrices
)
_ROOT = re.compile(r"\\?sqrt|√")
_FUNCTION = re.compile(
    r"(?:arc|ar)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])|(?<![a-z])(?:log|ln|exp|gcd|lcm|floor|ceil|max|min|erf)(?![a-z])"
    r"|\\(?:Gamma|Re|Im|arg|mod)(?![A-Za-z])|!(?!=)"
)
_BAR = re.compile(r"\||\\[lr]?(?:[vV]ert|floor|ceil|angle)(?![A-Za-z])|\\[lu][lr]corner")


def is_within_limits(answer: str) -> bool:
    """Return whether a parser may read `answer`. Takes under 10 ms."""
    return (
        len(answer) <= MAX_CHARS
        and not FORBIDDEN.search(answer)
        and len(_FUNCTION.findall(answer)) <= MAX_FUNCTIONS
        and len(_ROOT.findall(answer)) <= MAX_ROOTS
        and len(_BAR.findall(answer)) <= MAX_BARS
        and answer.count("&") + answer.count("\\\\") <= MAX_CELLS
        and answer.count("^") + answer.count("**") <= MAX_POWERS
        and _is_flat(answer)
    )


def _is_flat(answer: str) -> bool:
    """Return whether there are few brackets, not nested too deeply; an unclosed one counts up to the end."""
    depth = deepest = num_open = 0
    for char in answer:
        if char in "([{":
            depth, num_open = depth + 1, num_open + 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest <= MAX_DEPTH and num_open <= MAX_BRACKETS
