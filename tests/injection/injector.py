"""Raises at one point of the running package, for the values of one peer; everything else does as it always does.

Each function of a point is replaced once, before anything runs, by one that asks whether it is the armed point. What
the members of a test do in the same process is no part of the node: `in_member` tells them apart.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ftis_node.node.context import NodeContext, NodeCounters
from ftis_node.node.peers.registry import PeerRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from contextlib import ExitStack

in_member: ContextVar[bool] = ContextVar("in_member", default=False)
MAX_DEPTH = 5
PACKAGE = "ftis_node"


class Unexpected(Exception):
    """What no code expects."""


class Injector:
    """Each armed point raises. `marks` are what the hostile peer's values hold: ids as text and as bytes."""

    def __init__(self) -> None:
        self.marks: set[str | bytes] = set()
        self.armed: dict[str, int] = {}  # how often a point raises yet
        self.raised: list[str] = []
        self._for_all: set[str] = set()

    def arm(self, points: Iterable[str], *, times: int = 1, is_for_all: bool = False) -> None:
        """Each of these raises when it is reached next; `is_for_all`: whoever's the value is."""
        self.armed |= dict.fromkeys(points, times)
        self._for_all |= set(points) if is_for_all else set()

    def install(self, points: Iterable[str], stack: ExitStack) -> None:
        """Puts the points' functions in place until `stack` is closed. Raises LookupError for one that is gone."""
        for name in sorted({point.partition(">")[0] for point in points if ">" not in point}):
            self._replace_function(name, stack)
        for file, reader in sorted({(point.partition(":")[0], point.partition(">")[2]) for point in points}):
            if reader:
                self._replace_reader(file, reader, stack)

    def check(self, point: str, values: Iterable[object]) -> None:
        """Raises where `point` is armed and one of `values` is the hostile peer's."""
        if point not in self.armed or in_member.get():
            return
        if point in self._for_all or any(self._is_marked(value) for value in values):
            left = self.armed.pop(point, 0) - 1
            if left > 0:
                self.armed[point] = left
            self.raised.append(point)
            raise Unexpected(point)

    def _replace_function(self, point: str, stack: ExitStack) -> None:
        module, owner, name = _find(point)
        original = owner.__dict__[name]
        replaced: Any
        if isinstance(original, property):
            replaced = property(self._wrapped(point, original.fget))
        elif isinstance(original, staticmethod | classmethod):
            replaced = type(original)(self._wrapped(point, original.__func__))
        else:
            replaced = self._wrapped(point, original)
        stack.enter_context(patch.object(owner, name, replaced))
        if owner is module:
            for other in [each for key, each in sys.modules.items() if key.startswith(PACKAGE) and each is not module]:
                for alias in [key for key, value in vars(other).items() if value is original]:
                    stack.enter_context(patch.object(other, alias, replaced))

    def _replace_reader(self, file: str, reader: str, stack: ExitStack) -> None:
        """The reader as one module calls it; which function of it does, and so which point it is, says the stack."""
        module = importlib.import_module(_module_name(file))
        original = getattr(module, reader)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self.armed:
                caller = sys._getframe(1).f_code.co_qualname.partition(".<")[0]
                self.check(f"{file}:{caller}>{reader}", [*args, *kwargs.values()])
            return original(*args, **kwargs)

        stack.enter_context(patch.object(module, reader, replaced))

    def _wrapped(self, point: str, function: Any) -> Any:
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def items(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                self.check(point, [*args, *kwargs.values()])
                async with aclosing(function(*args, **kwargs)) as given:
                    async for item in given:
                        yield item

            return items
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                self.check(point, [*args, *kwargs.values()])
                return await function(*args, **kwargs)

            return awaited

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            self.check(point, [*args, *kwargs.values()])
            return function(*args, **kwargs)

        return plain

    def _is_marked(self, value: object, depth: int = MAX_DEPTH) -> bool:
        if isinstance(value, str | bytes | bytearray):
            kind = str if isinstance(value, str) else bytes
            return any(isinstance(mark, kind) and mark in value for mark in self.marks)  # type: ignore[operator]
        return depth > 0 and any(self._is_marked(part, depth - 1) for part in _parts_of(value))


def _parts_of(value: object) -> Iterator[object]:
    """What a value consists of, where it is data and no part of the node."""
    if isinstance(value, NodeContext | NodeCounters | PeerRegistry):
        return
    if is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, entry.name) for entry in fields(value))
    elif isinstance(value, tuple | list | set | frozenset):
        yield from value
    elif isinstance(value, dict):
        yield from value
        yield from value.values()
    elif hasattr(value, "SerializePartialToString"):
        yield value.SerializePartialToString()


def _find(point: str) -> tuple[Any, Any, str]:
    """The module of a point, what its function is an attribute of, and its name there."""
    file, _, qualified = point.partition(":")
    module = importlib.import_module(_module_name(file))
    *owners, name = qualified.split(".")
    owner: Any = module
    for each in owners:
        owner = getattr(owner, each)
    if name not in vars(owner):
        raise LookupError(f"{point} is gone: take it out of the table")
    return module, owner, name


def _module_name(file: str) -> str:
    return f"{PACKAGE}." + file.removesuffix(".py").replace("/", ".")
