"""The syntax of a small program: a part of Python that every Python from 3.11 on reads alike.

A receiver may have another Python than the sender, and both must give one observation. Releases of Python differ in
f-strings, names outside ASCII, escapes, new keywords, deep nesting and messages. So a lexer reads the text first and
refuses all of these by name. What is left has one syntax tree, or is "no valid program" without further words.
"""

from __future__ import annotations

import ast
import re
from typing import Final

MAX_CHARS: Final = 2000
MAX_TOKENS: Final = 500
MAX_NESTING: Final = 16  # brackets, and signs in a row
MAX_DEPTH: Final = 64  # of the syntax tree
MAX_LITERAL_DIGITS: Final = 40
MAX_DECIMAL_DIGITS: Final = 15  # a float has these digits exactly

OTHER_KEYWORDS: Final = frozenset(
    "as assert async await case class def del except finally from global import is lambda lazy match None nonlocal "
    "raise return try type with yield".split()
)
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
      | (?P<space>[ \n]+)
      | (?P<number>[0-9]+(?:\.[0-9]+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<text>"[ !\#-\[\]-~]*"|'[ -&(-\[\]-~]*')
      | (?P<sign>\*\*=?|//=?|[-+*/%<>=!]=|[-+*/%<>=()\[\],:])""",
    re.VERBOSE,
)
_NODES: Final = (
    ast.Module, ast.Expr, ast.Assign, ast.AugAssign, ast.For, ast.While, ast.If, ast.Break, ast.Continue, ast.Pass,
    ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.List, ast.Tuple,
    ast.Subscript, ast.Slice, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.expr_context,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.UAdd, ast.USub, ast.Not, ast.boolop,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn,
)  # fmt: skip


class ProgramError(Exception):
    """The text is no program, or the program fails or exceeds a limit."""


def parse_program(text: str) -> ast.Module:
    """Return the syntax tree of a program. Raises ProgramError."""
    if len(text) > MAX_CHARS:
        raise ProgramError(f"the program has more than {MAX_CHARS} characters")
    source = _read(text.replace("\r\n", "\n").expandtabs(4))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        raise ProgramError("no valid program") from None
    _check(tree)
    return tree


def _read(text: str) -> str:
    """Return the text without comments. Raises ProgramError for a token that is not of the language."""
    kept: list[str] = []
    place = num_tokens = nesting = run = 0
    before: str | None = None
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise ProgramError(f"unexpected {ascii(text[place])}")
        kind, token, place = found.lastgroup, found[0], found.end()
        if kind == "comment":
            continue
        kept.append(token)
        if kind == "space":
            before = kind
            continue
        num_tokens += 1
        if (kind == "name" and before == "number") or (kind == "text" and before == "name"):
            raise ProgramError(f"unexpected {ascii(token[:40])}")
        if kind == "number" and len(token) > (MAX_DECIMAL_DIGITS if "." in token else MAX_LITERAL_DIGITS):
            raise ProgramError("a number in the program has too many digits")
        if token in OTHER_KEYWORDS or token.startswith("__"):
            raise ProgramError(f"{token[:40]!r} is not available")
        nesting += (token in ("(", "[")) - (token in (")", "]"))
        run = run + 1 if token in ("-", "+", "not") else 0
        if max(nesting, run) > MAX_NESTING:
            raise ProgramError("the program is nested too deeply")
        if num_tokens > MAX_TOKENS:
            raise ProgramError(f"the program has more than {MAX_TOKENS} words and signs")
        before = kind
    return "".join(kept)


def _check(tree: ast.Module) -> None:
    """Raise ProgramError for a node that is not of the language, or for a deep tree."""
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        if not all(map(_is_known, level)):
            raise ProgramError("no valid program")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ProgramError("the program is nested too deeply")


def _is_known(node: ast.AST) -> bool:
    match node:
        case ast.Call():
            return isinstance(node.func, ast.Name) and not node.keywords
        case ast.For():
            return not node.orelse and _is_target(node.target)
        case ast.While():
            return not node.orelse
        case ast.comprehension():
            return _is_target(node.target)
        case ast.Assign():
            return all(isinstance(target, ast.Subscript) or _is_target(target) for target in node.targets)
        case ast.AugAssign():
            return isinstance(node.target, ast.Name | ast.Subscript)
    return isinstance(node, _NODES)


def _is_target(node: ast.AST) -> bool:
    """Return whether a node is a name or names that values are given to."""
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Tuple) and all(isinstance(one, ast.Name) for one in node.elts)
    )
