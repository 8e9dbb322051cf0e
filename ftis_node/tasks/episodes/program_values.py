"""The values of a small program, their functions, and the limits on both.

A value is a whole number, an exact fraction, a truth value, a text, a list, a tuple, a range, or None. A list holds no
lists, so no value can hold itself or grow without a step for each element. Limits count steps, bits and characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Final

from ftis_node.tasks.episodes.program_syntax import ProgramError

Number = int | Fraction
MAX_STEPS: Final = 50_000
MAX_BITS: Final = 2000  # of a numerator or denominator: 603 digits, which every Python writes
BITS_PER_STEP: Final = 64
MAX_TEXT: Final = 1000  # characters of a text
MAX_OUTPUT: Final = 500  # characters that are printed
MAX_TUPLE: Final = 8
MAX_RANGE: Final = 10**9
MAX_DECIMALS: Final = 20
_WHOLE = re.compile(r" *-?[0-9]{1,600} *")


class Meter:
    """What a run may still use, and what it has printed."""

    def __init__(self) -> None:
        self.output: list[str] = []
        self._steps_left = MAX_STEPS
        self._chars_left = MAX_OUTPUT

    def spend(self, steps: int = 1) -> None:
        """Take steps. Raises ProgramError if none are left."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise ProgramError(f"more than {MAX_STEPS} steps")

    def number(self, value: Number) -> Number:
        """Return a result, as a whole number if it is one. Charge for its size, and refuse a large one."""
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        self.spend(bits // BITS_PER_STEP)
        if bits > MAX_BITS:
            raise ProgramError(f"a number has more than {MAX_BITS} bits")
        return value.numerator if value.denominator == 1 else value

    def each(self, values: Any) -> Iterator[Any]:
        """Yield the elements of a value, one step each."""
        for value in several(values):
            self.spend()
            yield value

    def items(self, values: Any) -> Sequence[Any]:
        """Return a value with several elements, at one step for each."""
        self.spend(len(several(values)))
        return several(values)

    def joined(self, values: list[Any] | str) -> list[Any] | str:
        """Return a new list or text, at one step for each element. The caller has charged for its parts."""
        if isinstance(values, str) and len(values) > MAX_TEXT:
            raise ProgramError(f"a text has more than {MAX_TEXT} characters")
        return values

    def written(self, value: Any, *, is_inside: bool = False) -> str:
        """Return the text of a value, at one step for each character."""
        if isinstance(value, list | tuple):
            inside = ", ".join(self.written(one, is_inside=True) for one in value)
            end = "," if isinstance(value, tuple) and len(value) == 1 else ""
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{end})"
        text = f"'{value}'" if isinstance(value, str) and is_inside else str(value)
        self.spend(len(text))
        return text

    def write(self, *values: Any) -> None:
        line = " ".join(self.written(value) for value in values)
        self.output.append(line[: self._chars_left])
        self._chars_left -= len(line)
        if self._chars_left < 0:
            raise ProgramError(f"more than {MAX_OUTPUT} characters of output")


def several(values: Any) -> Sequence[Any]:
    """Return a value that has elements. Raises ProgramError for another one."""
    if not isinstance(values, list | tuple | range | str):
        raise ProgramError("not a list")
    return values


def numeric(value: Any) -> Number:
    if not isinstance(value, Number):
        raise ProgramError("not a number")
    return value


def whole(value: Any) -> int:
    if not isinstance(value, int):
        raise ProgramError("not a whole number")
    return value


def element(value: Any) -> Any:
    """Return a value that a list may hold. Raises ProgramError for another one."""
    if not isinstance(value, Number | str | tuple):
        raise ProgramError("a list holds numbers, texts and tuples")
    return value


def tuple_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a tuple. Raises ProgramError if it may not hold the values."""
    if len(values) > MAX_TUPLE or not all(isinstance(value, Number | str) for value in values):
        raise ProgramError(f"a tuple holds at most {MAX_TUPLE} numbers and texts")
    return tuple(values)


def size_of(value: Any) -> int:
    """Return the steps that a comparison of a value may take: those of its elements, and of theirs."""
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else len(value) if isinstance(value, str) else 1


def ordered(compare: Callable[[], Any]) -> Any:
    """Return a comparison's result; the caller has charged for it. Raises ProgramError for values without an order."""
    try:
        return compare()
    except TypeError:
        raise ProgramError("these values have no order") from None


def _sum(meter: Meter, values: Any) -> Number:
    total: Number = 0
    for value in meter.each(values):
        total = meter.number(total + numeric(value))
    return total


def _sorted(meter: Meter, values: Any) -> list[Any]:
    items = meter.items(values)
    meter.spend(sum(map(size_of, items)) * len(items).bit_length())
    return list(ordered(lambda: sorted(items)))


def _extreme(meter: Meter, choose: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
    items = meter.items(values[0]) if len(values) == 1 else values
    meter.spend(sum(map(size_of, items)))
    if not items:
        raise ProgramError("an empty list has no least and no largest value")
    return ordered(lambda: choose(items))


def _int(meter: Meter, value: Any) -> int:
    if not isinstance(value, str):
        return int(numeric(value))
    meter.spend(len(value))
    if not _WHOLE.fullmatch(value):
        raise ProgramError("not a whole number")
    return int(value)


def _round(meter: Meter, value: Any, decimals: Any = 0) -> Number:
    if not 0 <= whole(decimals) <= MAX_DECIMALS:
        raise ProgramError(f"round takes 0 to {MAX_DECIMALS} decimals")
    return meter.number(round(Fraction(numeric(value)), decimals))


def _range(_: Meter, *bounds: Any) -> range:
    if any(abs(whole(bound)) > MAX_RANGE for bound in bounds) or bounds[2:] == (0,):
        raise ProgramError(f"a range has bounds up to {MAX_RANGE}, and a step other than 0")
    return range(*bounds)


def _zip(meter: Meter, one: Any, other: Any) -> list[tuple[Any, ...]]:
    return [tuple_of(pair) for pair in zip(meter.items(one), meter.items(other), strict=False)]


FUNCTIONS: Final[dict[str, tuple[Callable[..., Any], range]]] = {
    "abs": (lambda _, value: abs(numeric(value)), range(1, 2)),
    "all": (lambda meter, values: all(meter.items(values)), range(1, 2)),
    "any": (lambda meter, values: any(meter.items(values)), range(1, 2)),
    "enumerate": (lambda meter, values: [tuple_of(pair) for pair in enumerate(meter.items(values))], range(1, 2)),
    "int": (_int, range(1, 2)),
    "len": (lambda _, values: len(several(values)), range(1, 2)),
    "list": (lambda meter, values: list(meter.items(values)), range(1, 2)),
    "max": (lambda meter, *values: _extreme(meter, max, values), range(1, 50)),
    "min": (lambda meter, *values: _extreme(meter, min, values), range(1, 50)),
    "print": (Meter.write, range(50)),
    "range": (_range, range(1, 4)),
    "round": (_round, range(1, 3)),
    "sorted": (_sorted, range(1, 2)),
    "str": (lambda meter, value: meter.joined(meter.written(value)), range(1, 2)),
    "sum": (_sum, range(1, 2)),
    "zip": (_zip, range(2, 3)),
}
"""Each function, and how many values it takes."""
