"""Bytes of one entry of each policy's state in this interpreter, measured on many of them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import cache

from ftis_node.backoff import BackoffTable, doubling
from ftis_node.replay.group_choice import Candidate
from ftis_node.swarm.pull_queue import PullItem, PullQueue
from ftis_node.swarm.rate_limits import Quotas, TokenBucket
from ftis_node.swarm.reputation import Behaviour, Reputation
from ftis_node.swarm.sequence import SequenceTracker

NUM_MADE = 512


@cache
def entry_bytes() -> dict[str, int]:
    """Return the bytes by kind of entry, including the ids in it."""
    makers: dict[str, Callable[[], object]] = {
        "wants": _wants,
        "trackers": lambda: {_peer(number): SequenceTracker(at=1.0 + number) for number in range(NUM_MADE)},
        "unconfirmed": _unconfirmed,
        "members": lambda: frozenset(_peer(number) for number in range(NUM_MADE)),
        "reputations": _reputations,
        "quotas": _quotas,
        "budgets": lambda: {
            _peer(number): TokenBucket(rate_per_s=1.0, burst=2.0 + number) for number in range(NUM_MADE)
        },
        "buffer": lambda: {_id(number): _candidate(number) for number in range(NUM_MADE)},
    }
    return {kind: _measure(make) for kind, make in makers.items()}


def _measure(make: Callable[[], object]) -> int:
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    made = make()
    after, _ = tracemalloc.get_traced_memory()
    if not was_tracing:
        tracemalloc.stop()
    del made
    return round((after - before) / NUM_MADE)


def _peer(number: int) -> str:
    return f"12D3KooW{number:044d}"


def _id(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _wants() -> PullQueue:
    queue = PullQueue(capacity=NUM_MADE)
    for number in range(NUM_MADE):
        item = PullItem(id=_id(number), sender=_peer(number), number=number, num_bytes=30000, created_at=1.0 + number)
        queue.add(item, holder=item.sender)
    return queue


def _unconfirmed() -> BackoffTable[bytes]:
    unconfirmed = BackoffTable[bytes](doubling(1.0))
    for number in range(NUM_MADE):
        unconfirmed.failed(_id(number), now=1.0 + number)
    return unconfirmed


def _reputations() -> dict[str, Reputation]:
    return {_peer(number): Reputation().after(Behaviour.CONTRIBUTED, now=1.0 + number) for number in range(NUM_MADE)}


def _quotas() -> Quotas:
    quotas = Quotas()
    for number in range(NUM_MADE):
        quotas.spend(_peer(number), 3600, is_new_peer=True, now=1.0 + number)
    return quotas


def _candidate(number: int) -> Candidate:
    return Candidate(
        id=_id(number), sender=_peer(number), own=False, arrival=1000 + number,
        created_at=1.0 + number, policy_version=0, problem=_id(number)[:16],
    )  # fmt: skip
