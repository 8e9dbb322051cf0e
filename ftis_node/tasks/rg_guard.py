"""Filter of the answers that reasoning-gym's verifiers may see, because some verifiers run them as code.

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
import re
import warnings
from typing import Final

from ftis_node.tasks.math.expression_limits import is_within_limits

EVALUATED: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
PARSED: Final = frozenset({"countdown", "intermediate_integration", "puzzle24", "simple_integration"})
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
