"""What a small program prints: a part of Python, exact, with a bound on its work.

    total = 0
    for n in range(500):
        if n % 7 == 0:
            total += n * n
    print(total)

It has assignments, `if`, `for`, `while`, comprehensions, and the functions of `program_values.FUNCTIONS`. It has no
attributes, methods, imports or definitions. Numbers are exact: 1/3 is a fraction. `+=` makes a new list. The value of
the last line is printed too.

Every evaluated expression costs a step, and long values cost more. Limits count steps, bits and characters, and never
seconds. So a slow machine and a fast one give the same text, also for a program that exceeds a limit.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from ftis_node.tasks.episodes.program_syntax import ProgramError, parse_program
from ftis_node.tasks.episodes.program_values import (
    FUNCTIONS,
    MAX_BITS,
    Meter,
    Number,
    element,
    numeric,
    ordered,
    several,
    size_of,
    tuple_of,
    whole,
)

_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: Fraction(left) / right,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@lru_cache(maxsize=256)  # an episode is played from its start at each turn
def output_of(program: str) -> str:
    """Return what a program prints. The last line begins with "error: " if the program fails or exceeds a limit."""
    meter = Meter()
    try:
        _Machine(meter).run(parse_program(program))
    except ProgramError as error:
        meter.output.append(f"error: {error}")
    except (OverflowError, ValueError):  # of Python's own limits
        meter.output.append("error: a value is too large")
    return "\n".join(meter.output) or "no output"


class _Jump(Exception):
    """`break` or `continue`."""

    def __init__(self, *, ends_loop: bool) -> None:
        self.ends_loop = ends_loop


class _Machine:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._names: dict[str, Any] = {}

    def run(self, tree: ast.Module) -> None:
        try:
            self._do_all(tree.body[:-1])
            for last in tree.body[-1:]:
                if not isinstance(last, ast.Expr):
                    self._do(last)
                elif (value := self._value(last.value)) is not None:
                    self._meter.write(value)
        except _Jump:
            raise ProgramError("'break' or 'continue' outside a loop") from None

    # Statements.

    def _do_all(self, nodes: Iterable[ast.stmt]) -> None:
        for node in nodes:
            self._do(node)

    def _do(self, node: ast.stmt) -> None:
        self._meter.spend()
        match node:
            case ast.Expr():
                self._value(node.value)
            case ast.Assign(value=ast.Tuple(elts=parts), targets=[ast.Tuple() as names]):
                self._unpack(names, [self._value(part) for part in parts])  # lists too, which no tuple holds
            case ast.Assign():
                value = self._value(node.value)
                for target in node.targets:
                    self._store(target, value)
            case ast.AugAssign():
                old = self._value(node.target)
                self._store(node.target, self._calculate(node.op, old, self._value(node.value)))
            case ast.If():
                self._do_all(node.body if self._value(node.test) else node.orelse)
            case ast.For():
                for value in self._meter.each(self._value(node.iter)):
                    self._store(node.target, value)
                    if self._ends_loop(node.body):
                        break
            case ast.While():
                while self._value(node.test) and not self._ends_loop(node.body):
                    pass
            case ast.Break() | ast.Continue():
                raise _Jump(ends_loop=isinstance(node, ast.Break))

    def _ends_loop(self, body: Iterable[ast.stmt]) -> bool:
        """Run the body of a loop once. Return whether it ended the loop."""
        try:
            self._do_all(body)
        except _Jump as jump:
            return jump.ends_loop
        return False

    def _store(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                self._names[target.id] = value
            case ast.Tuple():
                self._unpack(target, self._meter.items(value))
            case ast.Subscript():
                values = self._value(target.value)
                if not isinstance(values, list):
                    raise ProgramError("only an element of a list can be set")
                values[self._index(values, target.slice)] = element(value)

    def _unpack(self, target: ast.Tuple, values: Sequence[Any]) -> None:
        if len(values) != len(target.elts):
            raise ProgramError(f"{len(values)} values for {len(target.elts)} names")
        for one, value in zip(target.elts, values, strict=True):
            self._store(one, value)

    # Expressions.

    def _value(self, node: ast.expr) -> Any:
        self._meter.spend()
        match node:
            case ast.Constant(value=float() as decimal):
                return self._meter.number(Fraction(repr(decimal)))
            case ast.Constant():
                return node.value
            case ast.Name():
                if node.id not in self._names:
                    raise ProgramError(f"{node.id[:40]!r} has no value")
                return self._names[node.id]
            case ast.BinOp():
                return self._calculate(node.op, self._value(node.left), self._value(node.right))
            case ast.UnaryOp(op=ast.Not()):
                return not self._value(node.operand)
            case ast.UnaryOp():
                number = numeric(self._value(node.operand))
                return -number if isinstance(node.op, ast.USub) else +number
            case ast.BoolOp():
                for part in node.values:
                    value = self._value(part)
                    if bool(value) is isinstance(node.op, ast.Or):
                        break
                return value
            case ast.Compare():
                left = self._value(node.left)
                for sign, operand in zip(node.ops, node.comparators, strict=True):
                    right = self._value(operand)
                    if not self._holds(sign, left, right):
                        return False
                    left = right
                return True
            case ast.IfExp():
                return self._value(node.body if self._value(node.test) else node.orelse)
            case ast.List():
                return [element(self._value(part)) for part in node.elts]
            case ast.Tuple():
                return tuple_of([self._value(part) for part in node.elts])
            case ast.ListComp() | ast.GeneratorExp():
                return self._comprehension(node)
            case ast.Subscript():
                return self._part(several(self._value(node.value)), node.slice)
            case ast.Call(func=ast.Name(id=name)):
                return self._call(name, node.args)
        raise ProgramError("no valid program")  # a part of an index, outside one

    def _call(self, name: str, args: Sequence[ast.expr]) -> Any:
        if name not in FUNCTIONS:
            raise ProgramError(f"no function {name[:40]!r}; there are {', '.join(FUNCTIONS)}")
        function, counts = FUNCTIONS[name]
        if len(args) not in counts:
            raise ProgramError(f"{name} does not take {len(args)} values")
        return function(self._meter, *map(self._value, args))

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> list[Any]:
        outside, found = self._names, []
        self._meter.spend(len(outside))
        self._names = dict(outside)

        def collect(rest: Sequence[ast.comprehension]) -> None:
            if not rest:
                found.append(element(self._value(node.elt)))
                return
            for value in self._meter.each(self._value(rest[0].iter)):
                self._store(rest[0].target, value)
                if all(self._value(test) for test in rest[0].ifs):
                    collect(rest[1:])

        collect(node.generators)
        self._names = outside
        return found

    def _calculate(self, sign: ast.operator, left: Any, right: Any) -> Any:
        match left, right:
            case int() | Fraction(), int() | Fraction():
                if isinstance(sign, ast.Pow):
                    return self._power(left, right)
                if not right and not isinstance(sign, ast.Add | ast.Sub | ast.Mult):
                    raise ProgramError("division by zero")
                return self._meter.number(_ARITHMETIC[type(sign)](left, right))
            case (list(), list()) | (str(), str()) if isinstance(sign, ast.Add):
                self._meter.spend(len(left) + len(right))
                return self._meter.joined(left + right)
            case list() | str(), int() if isinstance(sign, ast.Mult):
                times = max(0, right) if left else 0
                self._meter.spend(len(left) * times)
                return self._meter.joined(left * times)
        raise ProgramError("a sign between the wrong kinds of values")

    def _power(self, base: Number, exponent: Number) -> Number:
        if not base and exponent < 0:
            raise ProgramError("division by zero")
        power, size = whole(exponent), max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1
        if size * abs(power) > MAX_BITS:
            raise ProgramError(f"a number has more than {MAX_BITS} bits")
        return self._meter.number(Fraction(base) ** power)

    def _holds(self, sign: ast.cmpop, left: Any, right: Any) -> bool:
        if isinstance(sign, ast.In | ast.NotIn):
            return self._contains(right, left) is isinstance(sign, ast.In)
        for value in (left, right):
            if isinstance(value, list | str | tuple):
                self._meter.spend(size_of(value))
        return bool(ordered(lambda: _COMPARISONS[type(sign)](left, right)))

    def _contains(self, values: Any, value: Any) -> bool:
        if isinstance(values, range):  # Python would compare a fraction with each number
            return isinstance(value, int) and value in values
        if isinstance(values, str) and not isinstance(value, str):
            raise ProgramError("a text contains only texts")
        if isinstance(value, tuple):
            self._meter.spend(len(values) * size_of(value))
        return value in self._meter.items(values)

    def _part(self, values: Sequence[Any], node: ast.expr) -> Any:
        if not isinstance(node, ast.Slice):
            return values[self._index(values, node)]
        bounds = [None if one is None else whole(self._value(one)) for one in (node.lower, node.upper, node.step)]
        if bounds[2] == 0:
            raise ProgramError("a part has a step other than 0")
        part = values[slice(*bounds)]
        if isinstance(part, range):  # each slice multiplies the step
            for number in (part.start, part.stop, part.step):
                self._meter.number(number)
        else:
            self._meter.spend(len(part))
        return part

    def _index(self, values: Sequence[Any], node: ast.expr) -> int:
        index = whole(self._value(node))
        if not -len(values) <= index < len(values):
            raise ProgramError("an index is out of range")
        return index
