"""An injector that raises exceptions at points of the running package, for the values of one peer.

It wraps the functions of all points before the node starts. A wrapper raises if its point is armed. Members of a test
run in the same process as the node; the injector skips them by `in_member`.
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
    """An exception that no code handles by its type."""


class Injector:
    """A set of armed points. `marks` are ids, as text and bytes, that occur in values of the hostile peer."""

    def __init__(self) -> None:
        self.marks: set[str | bytes] = set()
        self.armed: dict[str, int] = {}  # how often each point still raises
        self._for_all_peers: set[str] = set()

    def arm(self, points: Iterable[str], *, times: int = 1, for_all_peers: bool = False) -> None:
        """Arm points: each raises when it is reached next, with `for_all_peers` for values of any peer."""
        self.armed |= dict.fromkeys(points, times)
        self._for_all_peers |= set(points) if for_all_peers else set()

    def install(self, points: Iterable[str], stack: ExitStack) -> None:
        """Wrap the points' functions until `stack` closes. Raises LookupError for a function that does not exist."""
        for name in sorted({point.partition(">")[0] for point in points if ">" not in point}):
            self._replace_function(name, stack)
        for file, reader in sorted({(point.partition(":")[0], point.partition(">")[2]) for point in points}):
            if reader:
                self._replace_reader(file, reader, stack)

    def check(self, point: str, values: Iterable[object]) -> None:
        """Raise Unexpected if `point` is armed and one of `values` is of the hostile peer."""
        if point not in self.armed or in_member.get():
            return
        if point in self._for_all_peers or any(self._is_marked(value) for value in values):
            left = self.armed.pop(point, 0) - 1
            if left > 0:
                self.armed[point] = left
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
        """Wrap a reader as one module imports it. The call stack has the calling function, and so the point."""
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
                async with aclosing(function(*args, **kwargs)) as original_items:
                    async for item in original_items:
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
    """Yield the parts of a value that is data, and nothing for parts of the node."""
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
    """Return the module of a point, the owner of its function, and the function's name."""
    file, _, qualified = point.partition(":")
    module = importlib.import_module(_module_name(file))
    *owners, name = qualified.split(".")
    owner: Any = module
    for each in owners:
        owner = getattr(owner, each)
    if name not in vars(owner):
        raise LookupError(f"{point} does not exist: remove it from tests/injection/table.py")
    return module, owner, name


def _module_name(file: str) -> str:
    return f"{PACKAGE}." + file.removesuffix(".py").replace("/", ".")
