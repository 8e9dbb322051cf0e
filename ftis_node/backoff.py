"""Exponential back-off: the wait after a number of failures, and the waits by key, of peers, groups or members."""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

MAX_KEYS = 4096
KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """Exponential back-off: `first_s`, then twice as long after each further failure, up to `ceiling_s`.

    `jitter` spreads each wait by up to that fraction in both directions. Nodes that lost the same peer at the same time
    then do not reconnect at the same time.
    """

    first_s: float = 1.0
    ceiling_s: float = 60.0
    jitter: float = 0.2

    def delay_s(self, num_failures: int, *, draw: float = 0.5) -> float:
        """Return the wait in seconds after `num_failures` (>= 1) failures in a row; `draw` in [0, 1): the jitter."""
        num_doublings = min(num_failures - 1, 64)  # keeps the power finite; every ceiling is reached before
        plain_s = min(self.first_s * 2.0**num_doublings, self.ceiling_s)
        return plain_s * (1 + self.jitter * (2 * draw - 1))


def doubling(first_s: float) -> ExponentialBackoff:
    """Return a back-off from `first_s` to 64 times that, without jitter."""
    return ExponentialBackoff(first_s=first_s, ceiling_s=64 * first_s, jitter=0.0)


class _Wait(NamedTuple):
    until: float
    num_failures: int


class BackoffTable(Generic[KeyT]):
    """The waits of the `capacity` keys that failed last. `now` is a monotonic clock in seconds."""

    def __init__(
        self, backoff: ExponentialBackoff, *, capacity: int = MAX_KEYS, rng: random.Random | None = None
    ) -> None:
        """Without `rng` the waits have no jitter."""
        self._backoff = backoff
        self._capacity = capacity
        self._rng = rng
        self._waits: dict[KeyT, _Wait] = {}  # the one that failed longest ago first

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._waits

    def failed(self, key: KeyT, *, now: float, num_failures: int | None = None) -> None:
        """Count a failure and begin its wait. `num_failures` sets the count of failures in a row."""
        num_failures = num_failures or self._wait_of(key).num_failures + 1
        draw = 0.5 if self._rng is None else self._rng.random()
        self._set(key, _Wait(now + self._backoff.delay_s(num_failures, draw=draw), num_failures))

    def pause(self, key: KeyT, seconds: float, *, now: float) -> None:
        """Wait at least this long, for a peer that answered BUSY. This does not count as a failure."""
        wait = self._wait_of(key)
        self._set(key, wait._replace(until=max(wait.until, now + seconds)))

    def discard(self, key: KeyT) -> None:
        """Forget the failures of a key, because it succeeded or is not tried again."""
        self._waits.pop(key, None)

    def keep(self, keys: Container[KeyT]) -> None:
        """Forget the failures of all other keys."""
        for key in [key for key in self._waits if key not in keys]:
            del self._waits[key]

    def is_due(self, key: KeyT, *, now: float) -> bool:
        """Return whether the wait of a key is over, or it has none."""
        return self._wait_of(key).until <= now

    def due(self, *, now: float) -> list[tuple[KeyT, int]]:
        """Return the keys whose wait is over, each with its number of failures. `failed` or `discard` must follow."""
        return [(key, wait.num_failures) for key, wait in self._waits.items() if wait.until <= now]

    def has_failed(self, key: KeyT) -> bool:
        return self._wait_of(key).num_failures > 0

    def _wait_of(self, key: KeyT) -> _Wait:
        return self._waits.get(key, _Wait(float("-inf"), 0))

    def _set(self, key: KeyT, wait: _Wait) -> None:
        self._waits.pop(key, None)
        self._waits[key] = wait
        if len(self._waits) > self._capacity:
            del self._waits[next(iter(self._waits))]
