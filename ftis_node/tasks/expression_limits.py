r"""Limits of a mathematical answer, checked before any parser or SymPy sees it.

A dozen characters can keep a computer-algebra system busy for hours: `99^{999!}`, `\sum_{k=1}^{9999} 1/k`, thirty
nested fractions. An answer beyond one of the limits below is a wrong answer: it is scored 0. The limits are constants
and none is a time, so that all nodes give the same text the same reward. A changed limit changes a run's rewards.

The longest reference answer of MATH-500 has 53 characters, depth 2 and 8 powers. Bits and terms are upper bounds from
one pass over the text; nothing is computed with its numbers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

MAX_CHARS: Final = 500
MAX_DEPTH: Final = 8  # nested brackets, including braces of commands
MAX_BRACKETS: Final = 48  # opening brackets of all kinds
MAX_FRACTION_DEPTH: Final = 3
MAX_DIGITS: Final = 40  # in a row
MAX_POWERS: Final = 24  # exponents
MAX_FUNCTIONS: Final = 6  # `\sin`, `\log`, ... and `!`
MAX_ROOTS: Final = 6  # `\sqrt` and powers with a fraction as exponent
MAX_ROOT_DIGITS: Final = 2  # of a number in a root's index or in an exponent that is not whole
MAX_BINOMIALS: Final = 3  # `\binom`, `\choose`; with one of them, no number has more than three digits
MAX_BARS: Final = 8  # bars, floor signs and other pairs that are not brackets
MAX_CELLS: Final = 30  # of matrices
MAX_BITS: Final = 16_384  # of the largest number after evaluation: 2^9999 has 10,000
MAX_FUNCTION_BITS: Final = 512  # the same for an answer with a function
MAX_LOG_BITS: Final = 28  # the same with a logarithm, because SymPy rewrites c log(3) as log(3^c)
MAX_SHIFT: Final = 9  # numbers in a factorial of letters, such as (n + 1)!
MAX_TERMS: Final = 512  # when all brackets are multiplied out
# Sums, products, integrals, limits and operations on matrices, because an answer must be evaluated.
FORBIDDEN: Final = re.compile(
    r"\\(?:sum|prod|coprod|i*int|oint|idotsint|lim|limsup|liminf|bigcup|bigcap|det|xrightarrow|partial)(?![A-Za-z])"
    r"|[∑∏∫]"
    r"|\\sqrt\s*\[[^\]]*\d{3}"  # roots of degree 100 and above
    r"|(?<![A-Za-z])(?:eye|zeros|ones|cols|rows|diag|norm|rank|trace|rref|hstack|vstack|orthogonalize|nullspace"
    r"|diagonalize|eigenval\w*|eigenvect\w*|svd)\s*\}?\s*(?:\\left|\\!)?\s*[({\[]"
    r"|\\d?frac\s*\{\s*(?:d|\\mathrm\s*\{\s*d\s*\})\s*(?:\^[^{}]*|\^\{[^{}]*\})?\}"  # derivatives
)
_BINOMIAL = re.compile(r"\\(?:[dt]?binom|choose)(?![A-Za-z])")
_ROOT = re.compile(r"\\?sqrt|√")
_FUNCTION = re.compile(
    r"(?:arc|ar)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])|(?<![a-z])(?:log|ln|exp|gcd|lcm|floor|ceil|max|min|erf)(?![a-z])"
    r"|\\(?:Gamma|Re|Im|arg|mod)(?![A-Za-z])|!(?!=)"
)
_LOG = re.compile(r"(?<![a-z])(?:log|ln)(?![a-z])")
_BAR = re.compile(r"\||\\[lr]?(?:[vV]ert|floor|ceil|angle)(?![A-Za-z])|\\[lu][lr]corner")
_MATRIX_POWER = re.compile(r"matrix\}[^a-zA-Z]*(?:\\right)?[^a-zA-Z]*\^")
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\\.|\*\*|\S", re.DOTALL)
_BARS: Final = frozenset({"|", "\\|", "\\vert", "\\Vert"})
_OPEN: Final = frozenset({"(", "[", "{", "\\{", "\\(", "\\[", "\\lvert", "\\lVert", "\\lfloor", "\\lceil", "\\langle"})
_CLOSE: Final = frozenset({")", "]", "}", "\\}", "\\)", "\\]", "\\rvert", "\\rVert", "\\rfloor", "\\rceil", "\\rangle"})
_BETWEEN_TERMS: Final = frozenset("+-=<>,;:&") | {"\\\\", "\\pm", "\\mp", "\\le", "\\leq", "\\ge", "\\geq", "\\ne"}
_POWER: Final = frozenset({"^", "**"})
_FRACTIONS: Final = frozenset({"\\frac", "\\dfrac", "\\tfrac", "\\cfrac"})
_NO_BASE: Final = frozenset({"\\left", "\\right", "\\displaystyle", "\\,", "\\!", "\\;", "\\ ", "$"})
_BINOMIAL_BITS: Final = 1000.0
WORST: Final = 1e9  # beyond every limit; costs stay below its square, far from overflow
_COUNTED_TO: Final = 1000  # bounds counted terms and exponents; more exceed every limit


def is_within_limits(answer: str) -> bool:
    """Return whether a parser may read `answer`. Takes under 10 ms."""
    return (
        len(answer) <= MAX_CHARS
        and not FORBIDDEN.search(answer)
        and max((len(digits) for digits in re.findall(r"\d+", answer)), default=0) <= MAX_DIGITS
        and _has_few_functions(answer)
        and len(_ROOT.findall(answer)) <= MAX_ROOTS
        and _has_small_binomials(answer)
        and len(_BAR.findall(answer)) <= MAX_BARS
        and _has_small_matrices(answer)
        and answer.count("^") + answer.count("**") <= MAX_POWERS
        and _is_flat(answer)
        and _Reader(answer).is_cheap()
    )


def _has_few_functions(answer: str) -> bool:
    """Return whether there are few functions, and no other one beside a factorial: `(e^9)!` has 28,000 digits."""
    functions = _FUNCTION.findall(answer)
    return len(functions) <= MAX_FUNCTIONS and not 0 < functions.count("!") < len(functions)


def _has_small_binomials(answer: str) -> bool:
    num = len(_BINOMIAL.findall(answer))
    return num == 0 or (num <= MAX_BINOMIALS and not re.search(r"\d{4}", answer))


def _has_small_matrices(answer: str) -> bool:
    """Return whether there are few cells, and no function, root or power of a matrix, which SymPy would expand."""
    num_cells = answer.count("&") + answer.count("\\\\")
    if num_cells > MAX_CELLS:
        return False
    return "matrix}" not in answer or not any(kind.search(answer) for kind in (_FUNCTION, _ROOT, _MATRIX_POWER))


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


def _is_root_fine(exponent: list[str]) -> bool:
    """Return whether an exponent is whole or has only small numbers, which bounds the degree of the root."""
    is_whole = not any(
        token == "/" or "." in token or token in _FRACTIONS or _ROOT.match(token) or _FUNCTION.match(token.lstrip("\\"))
        for token in exponent
    )
    return is_whole or all(len(token) <= MAX_ROOT_DIGITS for token in exponent if token.isdecimal())


def _is_shift_fine(base: list[str]) -> bool:
    """Return whether a factorial has a number, or letters and small numbers: SymPy expands (x + 99)!."""
    has_letter = any(token.isalpha() or (token[0] == "\\" and token[1:].isalpha()) for token in base)
    return not has_letter or all(int(token) <= MAX_SHIFT for token in base if token.isdecimal())


def _max_bits(answer: str) -> int:
    if _LOG.search(answer):
        return MAX_LOG_BITS
    return MAX_FUNCTION_BITS if _FUNCTION.search(answer.replace("!", "")) else MAX_BITS


def _as_brackets(tokens: list[str]) -> list[str]:
    """Return bars as brackets, alternately opening and closing; an exponent behind one applies to all between them."""
    is_open = False
    for place, token in enumerate(tokens):
        if token in _BARS:
            is_open = not is_open
            tokens[place] = "(" if is_open else ")"
    return tokens


class _Reader:
    """Recursive-descent pass over an answer; `_is_flat` has bounded the recursion."""

    def __init__(self, answer: str) -> None:
        self._tokens = _as_brackets(_TOKEN.findall(answer))
        self._max_bits = _max_bits(answer)
        self._at = 0
        self._fractions = self._deepest_fraction = 0

    def is_cheap(self) -> bool:
        """Return whether numbers and terms stay within the limits."""
        cost = ExpressionCost()
        while self._at < len(self._tokens):
            cost = cost.plus(self._sum())
            self._at += 1  # skip a closing bracket without an opening one
        return (
            cost.bits <= self._max_bits
            and cost.terms * cost.below <= MAX_TERMS
            and self._deepest_fraction <= MAX_FRACTION_DEPTH
        )

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _sum(self) -> ExpressionCost:
        """Read terms up to a closing bracket or the end."""
        cost = self._product()
        while self._peek() in _BETWEEN_TERMS:
            self._at += 1
            if (token := self._peek()) and token not in _CLOSE:
                cost = cost.plus(self._product())
        return cost

    def _product(self) -> ExpressionCost:
        """Read factors up to the next term."""
        cost = ExpressionCost(bits=0.0)
        while (token := self._peek()) and token not in _BETWEEN_TERMS and token not in _CLOSE:
            if token == "/":
                self._at += 1
                if self._peek() and self._peek() not in _BETWEEN_TERMS | _CLOSE:
                    cost = cost.over(self._factor())
            else:
                cost = cost.times(self._factor())
        return cost

    def _factor(self) -> ExpressionCost:
        """Read a base with its chained factorials and exponents."""
        began = self._at
        cost = self._base()
        while (token := self._peek()) in _POWER or token == "!":
            self._at += 1
            if token == "!" and not _is_shift_fine(self._tokens[began : self._at]):
                cost = ExpressionCost(bits=WORST)
            elif token == "!":
                cost = capped(cost.value * max(1.0, cost.bits), cost.terms, cost.below)
            else:
                cost = cost.to_the(self._exponent())
        return cost

    def _exponent(self) -> ExpressionCost:
        """Read one group, command or character with its own exponents; a whole number without braces."""
        while self._peek() in ("-", "+", "^", "*") or self._peek() in _NO_BASE:
            self._at += 1
        if not self._peek() or self._peek() in _CLOSE:
            return ExpressionCost()
        began = self._at
        cost = self._factor()
        is_fine = _is_root_fine(self._tokens[began : self._at])
        return cost if is_fine else ExpressionCost(bits=WORST)

    def _base(self) -> ExpressionCost:
        token = self._peek()
        self._at += 1
        if token in _OPEN:
            return self._group()
        if token in _NO_BASE:
            return ExpressionCost(bits=0.0)
        if token[0] == "\\":
            return self._command(token)
        if digits := re.sub(r"\D", "", token):
            return ExpressionCost(bits=max(1.0, math.log2(int(digits) + 1)))
        return ExpressionCost(bits=1.0 if token.isalpha() else 0.0)

    def _group(self) -> ExpressionCost:
        cost = self._sum()
        if self._peek() in _CLOSE:
            self._at += 1
        return cost

    def _command(self, name: str) -> ExpressionCost:
        """Read a command with the groups that follow it, as one base; exponents apply to the last group."""
        self._fractions += name in _FRACTIONS
        self._deepest_fraction = max(self._deepest_fraction, self._fractions)
        groups: list[ExpressionCost] = []
        while self._peek() == "{" or (name == "\\sqrt" and not groups and self._peek() == "["):
            self._at += 1
            groups.append(self._group())
        self._fractions -= name in _FRACTIONS
        cost = ExpressionCost(bits=_BINOMIAL_BITS if _BINOMIAL.match(name) else 1.0)
        if name in _FRACTIONS and len(groups) > 1:
            return groups[0].over(groups[1])
        for group in groups:
            cost = cost.times(group)
        return cost


@dataclass(frozen=True, slots=True)
class ExpressionCost:
    """Bounds of an expression: bits of its largest number, terms above and below its fraction line."""

    bits: float = 1.0
    terms: float = 1.0
    below: float = 1.0

    @property
    def value(self) -> float:
        """Return its largest possible value as an exponent."""
        return float(2.0 ** min(self.bits, 30.0))

    def plus(self, other: ExpressionCost) -> ExpressionCost:
        """Return the bounds of a sum over one fraction line."""
        terms = self.terms * other.below + other.terms * self.below
        return capped(max(self.bits, other.bits) + 1.0, terms, self.below * other.below)

    def times(self, other: ExpressionCost) -> ExpressionCost:
        return capped(self.bits + other.bits, self.terms * other.terms, self.below * other.below)

    def over(self, other: ExpressionCost) -> ExpressionCost:
        return self.times(ExpressionCost(other.bits, other.below, other.terms))

    def to_the(self, exponent: ExpressionCost) -> ExpressionCost:
        times = exponent.value
        return capped(
            max(1.0, self.bits) * times, _multiplied_out(self.terms, times), _multiplied_out(self.below, times)
        )


def capped(bits: float, terms: float, below: float) -> ExpressionCost:
    return ExpressionCost(min(bits, WORST), min(terms, WORST), min(below, WORST))


def _multiplied_out(terms: float, times: float) -> float:
    """Return the number of terms of a sum of `terms` to the power of `times`."""
    if terms <= 1.0:
        return 1.0
    if times > _COUNTED_TO or terms > _COUNTED_TO:
        return WORST
    return min(WORST, float(math.comb(int(terms) + math.ceil(times) - 1, math.ceil(times))))
