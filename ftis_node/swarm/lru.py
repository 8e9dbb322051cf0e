"""Mappings of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
ENTRY_BYTES = 256  # of an entry beside its value


class LruDict(OrderedDict[K, V]):
    """Mapping of at most `capacity` keys: a new key displaces the one that was set least recently."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._capacity:
            self.popitem(last=False)


class LruBytes(Generic[K]):
    """Mapping to byte strings of at most `max_bytes` in total; a new one displaces those set least recently."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._values = OrderedDict[K, bytes]()

    def get(self, key: K) -> bytes | None:
        return self._values.get(key)

    def __setitem__(self, key: K, value: bytes) -> None:
        if key in self._values:
            self._num_bytes -= len(self._values.pop(key)) + ENTRY_BYTES
        self._values[key] = value
        self._num_bytes += len(value) + ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            _, displaced = self._values.popitem(last=False)
            self._num_bytes -= len(displaced) + ENTRY_BYTES
