"""Completions that were here before: right answers copied from a group of ours, of a peer's, or of one's own.

A completion counts as copied only where chance is ruled out: the same ids after the same prompt, at least
`min_tokens` of them, and so unlikely under the log-probs that came with the first that two honest draws would not
meet in the life of a run (`MIN_SURPRISE_NATS`: e^-20). Short answers are equal by honest chance, also with equal
log-probs, since two nodes may start from the same weights: they never count, so a run of completions below
`min_tokens` meets no refusal here. Nor does a policy that has collapsed onto one text: that text surprises nobody.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_SURPRISE_NATS = 20.0
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class DuplicateRules:
    """When a group is a copy. `max_share` is of its completions of `min_tokens` and more."""

    min_tokens: int = 32
    max_share: float = 0.25
    max_kept: int = 32768  # completions remembered, about 6 MB


class SeenCompletion(NamedTuple):
    """What is to be known of a completion: its ids as bytes, how many, and minus the sum of its log-probs in nats."""

    token_ids: bytes
    num_tokens: int
    surprise: float


class DuplicateKind(StrEnum):
    """Of what a group is a copy."""

    OURS = "copy_ours"  # of a group of this node: there is no doubt who was first
    OTHERS = "copy"  # of a peer's, or of the sender's own earlier one


class DuplicateDetector:
    """Remembers the telling completions of the groups admitted last, and who sent each first."""

    def __init__(self, own_id: str, rules: DuplicateRules) -> None:
        self._own_id = own_id
        self._rules = rules
        self._seen: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def judge(self, sender: str, prompt: str, completions: Sequence[SeenCompletion]) -> DuplicateKind | None:
        """Whether a group is a copy; None where it is not. A node's own group never is.

        The surprise is that of the first to send a completion: a copy may claim any. Within one group, its own.
        """
        long_ones = [told for told in completions if told.num_tokens >= self._rules.min_tokens]
        if sender == self._own_id or not long_ones:
            return None
        firsts, in_group = Counter[str](), set[bytes]()
        for told in long_ones:
            key = _key(prompt, told)
            if first := self._seen.get(key):
                firsts[first] += 1
            elif key in in_group and told.surprise >= MIN_SURPRISE_NATS:
                firsts[sender] += 1
            in_group.add(key)
        most = self._rules.max_share * len(long_ones)
        if firsts.total() <= most:
            return None
        return DuplicateKind.OURS if firsts[self._own_id] > most else DuplicateKind.OTHERS

    def remember(self, sender: str, prompt: str, completions: Sequence[SeenCompletion]) -> None:
        """Notes the telling completions of a group that was admitted; who was first stays first."""
        for told in completions:
            if told.num_tokens >= self._rules.min_tokens and told.surprise >= MIN_SURPRISE_NATS:
                key = _key(prompt, told)
                self._seen.setdefault(key, sender)
                self._seen.move_to_end(key)
        while len(self._seen) > self._rules.max_kept:
            self._seen.popitem(last=False)


def _key(prompt: str, told: SeenCompletion) -> bytes:
    return hashlib.blake2b(prompt.encode() + b"\0" + told.token_ids, digest_size=KEY_BYTES).digest()
