"""Mappings of bounded size."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
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

    def touched(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, made if there is none, as the one set most recently."""
        value = self[key] = self[key] if key in self else make()
        return value


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


class IdsByPeer:
    """Group ids by peer, which take turns. Above `capacity` the oldest id of the peer with the most is dropped."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._ids: dict[str, dict[bytes, None]] = {}
        self._by_count: defaultdict[int, dict[str, None]] = defaultdict(dict)  # peers by their number of ids
        self._most = 0  # ids of one peer
        self._num_ids = 0

    def __len__(self) -> int:
        return self._num_ids

    def add(self, peer_id: str, group_id: bytes) -> bytes | None:
        """Add an id as the newest of a peer. Return the dropped one."""
        ids = self._ids.setdefault(peer_id, {})
        if group_id in ids:
            del ids[group_id]
        else:
            self._recount(peer_id, len(ids), len(ids) + 1)
        ids[group_id] = None
        return None if self._num_ids <= self._capacity else self._pop_of(next(iter(self._by_count[self._most])))

    def has(self, peer_id: str, group_id: bytes) -> bool:
        return group_id in self._ids.get(peer_id, ())

    def take(self, most: int) -> list[tuple[str, bytes]]:
        """Remove and return up to `most` ids, one of each peer; these peers move to the end."""
        return [(peer_id, self._take_of(peer_id, 1)[0]) for peer_id in list(self._ids)[:most]]

    def take_of_next(self, may_take: Callable[[str], bool], *, most: int) -> tuple[str, list[bytes]] | None:
        """Remove and return up to `most` ids of the next peer for which `may_take` is true; None if there is none."""
        peer_id = next(filter(may_take, self._ids), None)
        return None if peer_id is None else (peer_id, self._take_of(peer_id, most))

    def _take_of(self, peer_id: str, most: int) -> list[bytes]:
        taken = [self._pop_of(peer_id) for _ in range(min(most, len(self._ids[peer_id])))]
        if (rest := self._ids.pop(peer_id, None)) is not None:
            self._ids[peer_id] = rest  # at the end
        return taken

    def _pop_of(self, peer_id: str) -> bytes:
        ids = self._ids[peer_id]
        self._recount(peer_id, len(ids), len(ids) - 1)
        group_id = next(iter(ids))
        del ids[group_id]
        if not ids:
            del self._ids[peer_id]
        return group_id

    def _recount(self, peer_id: str, before: int, after: int) -> None:
        """Note that a peer's number of ids changes by one, so that the peer with the most is found at once."""
        self._num_ids += after - before
        self._by_count[before].pop(peer_id, None)
        if not self._by_count[before]:
            del self._by_count[before]
        if after:
            self._by_count[after][peer_id] = None
        if after > self._most or self._most not in self._by_count:
            self._most = after
