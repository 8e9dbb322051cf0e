"""Detects copied completions, also those with changed tokens, and decides which of two equal groups is the original.

Two completions of one prompt are compared by runs of equal tokens, at the same or at shifted positions.

    evidence = sum over runs of (surprise of the run under the first sender's log-probs - price of the run)

A run at the start of both has price 0. After a gap of g other tokens the price is ln(g (g + 1)), for the choice of the
gap, plus `RUN_NATS`. A shift costs the logarithm of the number of shifts. So the evidence of independent completions
reaches E nats with a probability of at most about e^-E, whatever the second policy is. A completion is a copy from
`MIN_EVIDENCE_NATS` (e^-20). Likely text has no surprise. So honest nodes that sample the same short answer never count,
and neither does a policy that has collapsed onto one text. Such equal completions earn no credit (`new_nats`).

The original is the group that was announced first: its id is the hash of its contents. A slow link can reverse the
order. Copies of this node's groups and of the sender's own groups are certain enough for a charge. So is a new peer's
group that is announced long after the equal one of a known peer.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ftis_node.config.limits import ValidationSection
    from ftis_node.records.group import Group

MIN_EVIDENCE_NATS = 20.0
RUN_NATS = 3.0  # for the end of a run
MAX_KEPT_TOKENS = 1024  # of one completion
MAX_PER_PROMPT = 128  # completions
NUM_ANCHORS, ANCHOR_TOKENS = 16, 6  # windows of a completion that show where two texts agree
MAX_SHIFTS = 3  # between two texts, with which they are compared
MAX_COMPARED = 4  # known texts, the most similar by anchors, with which a completion is compared
ORDER_MARGIN_S = 60.0  # announcements this close have no certain order
MAX_TOKEN_NATS = 2.0  # of one token, in `new_nats`
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class SeenCompletion(NamedTuple):
    """The first `MAX_KEPT_TOKENS` token ids int32 `[T]` of a completion, and their surprise float32 `[T]` in nats."""

    ids: NDArray[np.int32]
    nats: NDArray[np.float32]


class Origin(NamedTuple):
    """Group of a completion. `announced_at` is when this node received its first announcement; None: unknown."""

    sender: str
    group_id: bytes = b""
    announced_at: float | None = None


class Copy(NamedTuple):
    """Result of a search: the earlier group, and whether also the copier's log-probs make chance unlikely."""

    first: Origin
    is_unlikely_twice: bool


class DuplicateKind(StrEnum):
    """Decision about a group with copied completions; the values are rejection reasons."""

    OURS = "duplicate_of_own"  # of a group of this node, which is certain
    COPY = "duplicate_completions"  # of its sender's own earlier group, or of a known peer's long before
    UNDECIDED = "duplicate_undecided"  # either of the two groups may be the original


def describe(group: Group) -> list[SeenCompletion]:
    """Return the completions of a group in the form in which the detector compares and keeps them."""
    ids = [one[:MAX_KEPT_TOKENS] for one in group.tokens.ids_of_each()]
    if group.mean_logprobs:  # sent as text
        nats = [np.full(len(one), -mean, dtype=np.float32) for one, mean in zip(ids, group.mean_logprobs, strict=True)]
    else:
        nats = [-one[:MAX_KEPT_TOKENS] for one in group.tokens.logprobs_of_each()]
    return [SeenCompletion(one, np.maximum(surprise, 0)) for one, surprise in zip(ids, nats, strict=True)]


def new_nats(completions: Sequence[SeenCompletion], known: Sequence[SeenCompletion]) -> float:
    """Return the surprise of the completions that equal no known and no earlier one, with a limit for each token."""
    seen, total = {one.ids.tobytes() for one in known}, 0.0
    for completion in completions:
        key = completion.ids.tobytes()
        total += 0.0 if key in seen else float(np.minimum(completion.nats, MAX_TOKEN_NATS).sum())
        seen.add(key)
    return total


def decide(copy: Copy, again: Origin, *, own_id: str, is_known: Callable[[str], bool]) -> DuplicateKind | None:
    """Return why to refuse the group `again`, whose completions were in `copy.first` before.

    None: it is the original, because it was announced before the other. `is_known` returns whether a peer has earned
    its own rate limits.
    """
    first = copy.first
    if first.sender == own_id:
        return DuplicateKind.OURS
    if first.sender == again.sender:
        return DuplicateKind.COPY
    if first.announced_at is None or again.announced_at is None:
        return DuplicateKind.UNDECIDED
    is_newcomers_word = is_known(first.sender) and not is_known(again.sender)
    if again.announced_at < first.announced_at:
        return DuplicateKind.UNDECIDED if is_newcomers_word else None
    is_certain = again.announced_at - first.announced_at > ORDER_MARGIN_S and copy.is_unlikely_twice
    return DuplicateKind.COPY if is_newcomers_word and is_certain else DuplicateKind.UNDECIDED


class _Kept(NamedTuple):
    """A completion that others are compared with. `anchors` are the hashes of evenly spaced windows at `places`.

    A completion without enough surprise has no anchors, because nothing can be its copy.
    """

    completion: SeenCompletion
    origin: Origin
    anchors: NDArray[np.uint64]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, completion: SeenCompletion, origin: Origin, windows: NDArray[np.uint64]) -> _Kept:
        """Return a completion whose windows have the hashes `windows`."""
        count = len(windows) if completion.nats.sum() >= MIN_EVIDENCE_NATS else 0
        places = np.arange(0, count, max(1, count // NUM_ANCHORS))
        return cls(completion, origin, windows[places], places)


class DuplicateDetector:
    """Completions of accepted groups by prompt, at most `validation.duplicate_history_size` tokens.

    Beyond it the prompts without a new group for the longest time are forgotten.
    """

    def __init__(self, own_id: str, limits: ValidationSection) -> None:
        self._own_id = own_id
        self._limits = limits
        self._kept: OrderedDict[bytes, list[_Kept]] = OrderedDict()
        self.num_tokens = 0

    def known(self, prompt: str) -> list[SeenCompletion]:
        """Return the kept completions of a prompt."""
        return [one.completion for one in self._kept.get(_key(prompt), ())]

    def find(self, sender: str, prompt: str, completions: Sequence[SeenCompletion]) -> Copy | None:
        """Return the group from which too many long completions are copied; None if the group is not a copy.

        A node's own group never is. The surprise is the one that the first sender reported, because a copy may claim
        any value. For repetitions within one group it is that group's value.
        """
        long = [one for one in completions if len(one.ids) >= self._limits.duplicate_min_tokens]
        if sender == self._own_id or not long:
            return None
        most = self._limits.duplicate_max_fraction * len(long)
        kept, windows = self._kept.get(_key(prompt), []), _windows_of(long)
        texts = [*kept, *(_Kept.of(one, Origin(sender), hashes) for one, hashes in zip(long, windows, strict=True))]
        firsts, num_twice = Counter[Origin](), 0
        for place, similar in _most_similar(windows, texts, num_before=len(kept)).items():
            if (first := _first_of(long[place], similar)) is not None:
                firsts[first] += 1
                num_twice += bool(long[place].nats.sum() >= MIN_EVIDENCE_NATS)
        if firsts.total() <= most:
            return None
        own = [first for first in firsts if first.sender == self._own_id]
        is_of_own = sum(firsts[first] for first in own) > most
        return Copy(own[0] if is_of_own else max(firsts, key=firsts.__getitem__), num_twice > most)

    def remember(self, origin: Origin, prompt: str, completions: Sequence[SeenCompletion]) -> None:
        """Keep the completions of an accepted group. Equal ones keep their first origin."""
        key = _key(prompt)
        kept = self._kept.pop(key, [])
        equal = {one.completion.ids.tobytes() for one in kept}
        new = [one._replace(ids=one.ids.copy()) for one in completions if one.ids.tobytes() not in equal]
        self.num_tokens += sum(len(one.ids) for one in new)
        made = [_Kept.of(one, origin, windows) for one, windows in zip(new, _windows_of(new), strict=True)]
        self._kept[key] = kept = [*kept, *made]
        self._drop(kept, len(kept) - MAX_PER_PROMPT)
        while self.num_tokens > self._limits.duplicate_history_size and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._drop(oldest, len(oldest))

    def forget(self, group_id: bytes, prompt: str) -> None:
        """Drop the completions of a group, because an equal one is the original."""
        kept = self._kept.get(_key(prompt), [])
        kept.sort(key=lambda one: one.origin.group_id != group_id)
        self._drop(kept, sum(one.origin.group_id == group_id for one in kept))

    def _drop(self, kept: list[_Kept], count: int) -> None:
        """Drop the first `count` completions of a prompt."""
        self.num_tokens -= sum(len(one.completion.ids) for one in kept[: max(0, count)])
        del kept[: max(0, count)]


def _key(prompt: str) -> bytes:
    return hashlib.blake2b(prompt.encode(), digest_size=16).digest()


def _windows_of(completions: Sequence[SeenCompletion]) -> list[NDArray[np.uint64]]:
    """Return the hashes of all `ANCHOR_TOKENS` successive ids by completion; a collision costs only a comparison."""
    if not completions:
        return []
    ids = np.concatenate([one.ids for one in completions]).astype(np.uint64)
    count = max(0, len(ids) - ANCHOR_TOKENS + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for at in range(ANCHOR_TOKENS):
        hashes *= MULTIPLIER
        hashes += ids[at : at + count]
    ends = np.cumsum([len(one.ids) for one in completions]).tolist()
    begins = [0, *ends[:-1]]
    return [hashes[begin : max(begin, end - ANCHOR_TOKENS + 1)] for begin, end in zip(begins, ends, strict=True)]


def _most_similar(
    windows_of: Sequence[NDArray[np.uint64]], texts: Sequence[_Kept], *, num_before: int
) -> dict[int, list[tuple[int, _Kept, list[int]]]]:
    """Return, by place of a completion, the texts with most anchors in it: their place and likely shifts.

    The texts after the first `num_before` are the completions themselves; each is compared with the texts before it.
    """
    anchors, flat = np.concatenate([text.anchors for text in texts]), np.concatenate(windows_of)
    ordered = np.sort(anchors)
    num_own = sum(len(text.anchors) for text in texts[num_before:])
    num_hits = (np.searchsorted(ordered, flat, side="right") - np.searchsorted(ordered, flat)).sum()
    if num_hits <= num_own:  # each anchor of the completions themselves is one of their windows
        return {}
    owners = np.repeat(np.arange(len(texts)), [len(text.anchors) for text in texts])
    places = np.concatenate([text.places for text in texts])
    similar = {}
    for place, hashes in enumerate(windows_of):
        windows, first_at = np.unique(hashes, return_index=True)
        if not len(windows):
            continue
        found = np.minimum(np.searchsorted(windows, anchors), len(windows) - 1)
        is_hit = (windows[found] == anchors) & (owners < num_before + place)
        counts = np.bincount(owners[is_hit], minlength=len(texts))
        best = [one for one in np.argsort(-counts, kind="stable")[:MAX_COMPARED].tolist() if counts[one]]
        shifts = first_at[found] - places
        similar[place] = [(one, texts[one], _common(shifts[is_hit & (owners == one)].tolist())) for one in best]
    return similar


def _common(shifts: list[int]) -> list[int]:
    return [shift for shift, _ in Counter(shifts).most_common(MAX_SHIFTS)]


def _first_of(completion: SeenCompletion, similar: Sequence[tuple[int, _Kept, list[int]]]) -> Origin | None:
    """Return the origin of the first text from which a completion is copied; None if it is not a copy."""
    copied = [
        (place, text.origin)
        for place, text, shifts in similar
        if evidence(text.completion, completion.ids, shifts) >= MIN_EVIDENCE_NATS
    ]
    return min(copied, key=lambda one: one[0])[1] if copied else None


def evidence(first: SeenCompletion, again: NDArray[np.int32], shifts: Sequence[int]) -> float:
    """Return the evidence, in nats, that the token ids `again` are a copy of `first`, with tokens moved by `shifts`."""
    num_first, num_again = len(first.ids), len(again)
    sums = np.concatenate([[0.0], np.cumsum(first.nats, dtype=np.float64)])
    is_covered, total_price = np.zeros(num_first, dtype=bool), 0.0
    for shift in shifts:
        begin = max(0, -shift)
        end = max(begin, min(num_first, num_again - shift))
        is_equal = np.zeros(num_first + 2, dtype=np.int8)  # with an unequal token before and after
        is_equal[1 + begin : 1 + end] = first.ids[begin:end] == again[begin + shift : end + shift]
        edges = np.flatnonzero(np.diff(is_equal))
        starts, stops = edges[::2], edges[1::2]
        nats = sums[stops] - sums[starts]
        last_stop, price_of_shift = 0, math.log(num_again) + RUN_NATS if shift else 0.0
        for at in np.flatnonzero(nats > (0.0 if shift == 0 else RUN_NATS)).tolist():
            gap = int(starts[at]) - last_stop
            price = price_of_shift + (RUN_NATS + math.log(gap * (gap + 1)) if gap else 0.0)
            if nats[at] > price:
                is_covered[starts[at] : stops[at]] = True  # a token counts once
                total_price, last_stop, price_of_shift = total_price + price, int(stops[at]), 0.0
    return float(first.nats[is_covered].sum() - total_price)
