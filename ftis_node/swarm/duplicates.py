"""Detects copied completions: copies from a group of this node, of a peer, or of the sender itself.

A completion counts as a copy only if chance is ruled out: the same token ids after the same prompt, at least
`validation.duplicate_min_tokens` long. Its log-probs must also make it so unlikely that two honest samples would not
collide during a run (`MIN_SURPRISE_NATS`: e^-20). Short answers never count, because honest nodes with equal weights
may sample the same ones. A policy that has collapsed onto one text is safe, too, because that text has no surprise.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from ftis_node.swarm.lru import LruDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.limits import ValidationSection

MIN_SURPRISE_NATS = 20.0
KEY_BYTES = 16
ID_BYTES = 4  # of a token id


class SeenCompletion(NamedTuple):
    """A long completion: hash of its prompt and token ids, and surprise (minus the sum of the log-probs, in nats)."""

    key: bytes
    surprise: float


class DuplicateKind(StrEnum):
    """Source of copied completions; the values are rejection reasons."""

    OURS = "duplicate_of_own"  # a group of this node, which is certain
    OTHERS = "duplicate_completions"  # a group of another peer, or an earlier one of the sender


class DuplicateDetector:
    """Bounded LRU set of accepted completions, with the first sender of each."""

    def __init__(self, own_id: str, limits: ValidationSection) -> None:
        self._own_id = own_id
        self._limits = limits
        self._seen = LruDict[bytes, str](limits.duplicate_history_size)

    def __len__(self) -> int:
        return len(self._seen)

    def describe(
        self, prompt: str, token_ids: bytes, *, lengths: Sequence[int], surprises: Sequence[float]
    ) -> list[SeenCompletion]:
        """Return those completions of a group that are long enough to count as copies.

        `token_ids` holds the int32 ids of all completions, one completion after the other.
        """
        of_prompt = hashlib.blake2b(prompt.encode() + b"\0", digest_size=KEY_BYTES)
        ids, begin, seen = memoryview(token_ids), 0, []
        for length, surprise in zip(lengths, surprises, strict=True):
            end = begin + ID_BYTES * length
            if length >= self._limits.duplicate_min_tokens:
                hashed = of_prompt.copy()
                hashed.update(ids[begin:end])
                seen.append(SeenCompletion(hashed.digest(), surprise))
            begin = end
        return seen

    def judge(self, sender: str, completions: Sequence[SeenCompletion]) -> DuplicateKind | None:
        """Return the kind of copy, None if the group is not a copy. A node's own group never is.

        The surprise is the one that the first sender reported, because a copy may claim any value. For repetitions
        within one group it is that group's value.
        """
        if sender == self._own_id or not completions:
            return None
        firsts, in_group = Counter[str](), set[bytes]()
        for key, surprise in completions:
            if first := self._seen.get(key):
                firsts[first] += 1
            elif key in in_group and surprise >= MIN_SURPRISE_NATS:
                firsts[sender] += 1
            in_group.add(key)
        most = self._limits.duplicate_max_fraction * len(completions)
        if firsts.total() <= most:
            return None
        return DuplicateKind.OURS if firsts[self._own_id] > most else DuplicateKind.OTHERS

    def remember(self, sender: str, completions: Sequence[SeenCompletion]) -> None:
        """Add the surprising completions of an accepted group. Known ones keep their first sender."""
        for key, surprise in completions:
            if surprise >= MIN_SURPRISE_NATS:
                self._seen[key] = self._seen.get(key, sender)
