"""An injector that raises exceptions at points of the running package, for the values of one peer.

It wraps the functions of all points before the node starts. A wrapper raises if its point is armed. Members of a test
run in the same process as the node; the injector skips them by `in_member`.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

from ftis_node.gossip.directory.entries import DirectoryEntry
from ftis_node.node.context import NodeContext, NodeCounters
from ftis_node.node.peers.peer_registry import PeerRegistry

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
        self._make_error: Callable[[str], Exception] = Unexpected
        self._is_for_all_peers = False

    def arm(
        self,
        points: Iterable[str],
        make_error: Callable[[str], Exception] = Unexpected,
        *,
        times: int = 1,
        for_all_peers: bool = False,
    ) -> None:
        """Arm points: each raises when it is reached next, with `for_all_peers` for values of any peer."""
        self.armed |= dict.fromkeys(points, times)
        self._make_error, self._is_for_all_peers = make_error, for_all_peers

    def install(self, points: Iterable[str], stack: ExitStack) -> None:
        """Wrap the points' functions, in all modules that import them, until `stack` closes."""
        for point in points:
            module, owner, name = _find(point)
            original = owner.__dict__[name]
            is_class_method = isinstance(original, classmethod)
            replaced: Any = self._wrapped(point, original.__func__ if is_class_method else original)
            stack.enter_context(patch.object(owner, name, classmethod(replaced) if is_class_method else replaced))
            if owner is module:
                for other in [each for key, each in sys.modules.items() if key.startswith(PACKAGE)]:
                    for alias in [key for key, value in vars(other).items() if value is original]:
                        stack.enter_context(patch.object(other, alias, replaced))

    def check(self, point: str, values: Iterable[object]) -> None:
        """Raise an error if `point` is armed and one of `values` is of the hostile peer."""
        if point not in self.armed or in_member.get():
            return
        if self._is_for_all_peers or any(self._is_marked(value) for value in values):
            left = self.armed.pop(point) - 1
            if left > 0:
                self.armed[point] = left
            raise self._make_error(point)

    def _wrapped(self, point: str, function: Any) -> Any:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                self.check(point, _values_of(args, kwargs))
                return await function(*args, **kwargs)

            return awaited

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            self.check(point, _values_of(args, kwargs))
            return function(*args, **kwargs)

        return plain

    def _is_marked(self, value: object, depth: int = MAX_DEPTH) -> bool:
        if isinstance(value, str | bytes | bytearray):
            kind, marks = str if isinstance(value, str) else bytes, tuple(self.marks)  # another thread may add some
            return any(isinstance(mark, kind) and mark in value for mark in marks)  # type: ignore[operator]
        return depth > 0 and any(self._is_marked(part, depth - 1) for part in _parts_of(value))


def _values_of(args: Iterable[object], kwargs: Mapping[str, object]) -> list[object]:
    """Return the arguments that come from a peer, without the ids that the node itself has `requested`."""
    return [*args, *(value for name, value in kwargs.items() if name != "requested")]


def _parts_of(value: object) -> Iterator[object]:
    """Yield the parts of a value that is data, and nothing for parts of the node.

    An entry of the directory is its signer's, though its addresses may name relays.
    """
    if isinstance(value, NodeContext | NodeCounters | PeerRegistry):
        return
    if isinstance(value, DirectoryEntry):
        yield value.peer_id
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, entry.name) for entry in fields(value))
    elif isinstance(value, tuple | list | set | frozenset):
        yield from value
    elif isinstance(value, dict):
        yield from value
        yield from value.values()


def _find(point: str) -> tuple[Any, Any, str]:
    """Return the module of a point such as `node.loops.pull:PullLoop.run`, the function's owner and name."""
    module_name, _, qualified = point.partition(":")
    module = importlib.import_module(f"{PACKAGE}.{module_name}")
    *owners, name = qualified.split(".")
    owner: Any = module
    for each in owners:
        owner = getattr(owner, each)
    return module, owner, name
