"""Detects copied completions, also those with changed tokens, and decides which of two equal groups is the original.

Two completions of one problem are compared by runs of equal tokens, at the same or at shifted positions.

    evidence = sum over runs of (surprise of the run under the first sender's log-probs - price of the run)

A run at the start of both has price 0. After a gap of g other tokens the price is ln(g (g + 1)), for the choice of the
gap, plus `RUN_NATS`. A change of the shift by d tokens costs ln(2 d (d + 1)). So the evidence of independent
completions reaches E nats with a probability of at most about e^-E, whatever the second policy is. Likely text has no
surprise, so honest nodes that sample the same short answer never count.

Of a group sent as text only the mean surprise is known, which its likely part exceeds. So `MIN_COMMON` of the tokens
must be equal, and no peer is charged. With `top_p` a token is up to 1 / `top_p` likelier than its log-prob says, so it
counts ln `top_p` nats less. With `top_k` there is no such bound, and nothing counts as a copy.
docs/develop/validation.md has measurements, and says which copies are charged.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftis_node.records.group import Group
from ftis_node.swarm.lru import IdsByPeer
from ftis_node.swarm.similarity import SeenCompletion, first_copied, new_nats, seen_completions, similar

MIN_LONG_TOKENS = 32  # of a completion that is compared: shorter ones may be equal by chance
MAX_COPIED_FRACTION = 0.25  # of a group's long completions
MAX_HISTORY_BYTES = 64 << 20  # 5 million tokens if each completion has 1024; 55,000 completions of one token
KEPT_BYTES = 1200  # of one completion besides its arrays' elements, with its share of a group of two and their problem
MIN_EVIDENCE_NATS = 20.0
MAX_KEPT_TOKENS = 1024  # of one completion
MAX_PER_PROBLEM = 128  # completions
MAX_ANNOUNCED = 1 << 14
MAX_SEARCHES = 2  # whose results are kept, because intake asks twice about a group: for each lane of peers
ORDER_MARGIN_S = 60.0  # announcements this close have no certain order


class Origin(NamedTuple):
    """Group of a completion. `announced_at` is when this node received its first announcement; None: unknown."""

    sender: str
    group_id: bytes = b""
    announced_at: float | None = None


class Copy(NamedTuple):
    """Result of a search: the earlier group, and whether also the copier's log-probs make chance unlikely.

    `is_text`: one of the two groups arrived as text.
    """

    first: Origin
    is_unlikely_twice: bool
    is_text: bool = False


class DuplicateKind(StrEnum):
    """Decision about a group with copied completions; the values are refusal reasons."""

    OURS = "duplicate_of_own"  # of a group of this node, which is certain
    COPY = "duplicate_completions"  # of its sender's own earlier group, or of a known peer's long before
    UNDECIDED = "duplicate_undecided"  # either of the two groups may be the original


def describe(group: Group) -> list[SeenCompletion]:
    """Return the completions of a group in the form in which the detector compares and keeps them.

    Their surprise is a lower bound of the one under the distribution that `top_p` leaves; with `top_k` there is none.
    """
    tokens, is_text = group.tokens, bool(group.mean_logprobs)
    logprobs = np.repeat(group.mean_logprobs, tokens.lengths) if is_text else tokens.logprobs
    nats = np.maximum(math.log(group.sampling.top_p) - logprobs, 0).astype(np.float32)
    return seen_completions(tokens.token_ids, nats, tokens.lengths.tolist(), most=MAX_KEPT_TOKENS, is_text=is_text)


def decide(copy: Copy, again: Origin, *, own_id: str, is_known: Callable[[str], bool]) -> DuplicateKind | None:
    """Return why to refuse the group `again`, whose completions were in `copy.first` before.

    None: it is the original, because it was announced before the other. `is_known` returns whether a peer has earned
    its own rate limits.
    """
    first = copy.first
    if copy.is_text and first.sender in (own_id, again.sender):
        return DuplicateKind.UNDECIDED
    if first.sender == own_id:
        return DuplicateKind.OURS
    if first.sender == again.sender:
        return DuplicateKind.COPY
    if first.announced_at is None or again.announced_at is None:
        return DuplicateKind.UNDECIDED
    is_newcomers_word = is_known(first.sender) and not is_known(again.sender)
    if again.announced_at < first.announced_at:
        return DuplicateKind.UNDECIDED if is_newcomers_word else None
    is_certain = (
        again.announced_at - first.announced_at > ORDER_MARGIN_S and copy.is_unlikely_twice and not copy.is_text
    )
    return DuplicateKind.COPY if is_newcomers_word and is_certain else DuplicateKind.UNDECIDED


def _has_surprise(completion: SeenCompletion) -> bool:
    """Return whether a copy of the completion is unlikely to occur by chance."""
    return bool(completion.nats.sum() >= MIN_EVIDENCE_NATS)


class _Kept(NamedTuple):
    """A kept completion, and the hash of its ids."""

    completion: SeenCompletion
    origin: Origin
    ids_hash: int
    has_surprise: bool

    @property
    def num_bytes(self) -> int:
        """Return the memory that the completion takes, in bytes."""
        one = self.completion
        return KEPT_BYTES + sum(array.nbytes for array in (one.ids, one.nats, one.windows, one.places))


class _Search(NamedTuple):
    """A search for `completions` of `sender` among those `kept`, and its result; it compared `texts`."""

    sender: str
    completions: Sequence[SeenCompletion]
    kept: Sequence[_Kept]
    texts: Sequence[SeenCompletion]
    pairings: NDArray[np.int64]
    copy: Copy | None


class FirstAnnouncements:
    """When groups were announced first, of the last `capacity` ones.

    Beyond it the announcer of most groups loses its oldest one. So a peer that announces many displaces only its own.
    """

    def __init__(self, *, capacity: int = MAX_ANNOUNCED) -> None:
        self._ids = IdsByPeer(capacity=capacity)
        self._times: dict[bytes, float] = {}

    def note(self, group_id: bytes, *, announcer: str, at: float) -> None:
        """Note an announcement at `at`. A repeated one shows no order."""
        if group_id not in self._times:
            self._times[group_id] = at
            if (dropped := self._ids.add(announcer, group_id)) is not None:
                del self._times[dropped]

    def at(self, group_id: bytes) -> float | None:
        """Return the time of the first announcement; None if it is unknown."""
        return self._times.get(group_id)


class DuplicateDetector:
    """Completions of accepted groups by the hash of their problem.

    It takes at most `MAX_HISTORY_BYTES`. Beyond it the problems without a new group for the
    longest time are forgotten.
    """

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._kept: OrderedDict[bytes, list[_Kept]] = OrderedDict()  # another list after each change
        self._searches: deque[_Search] = deque(maxlen=MAX_SEARCHES)
        self.num_bytes = 0

    def new_nats(self, problem: bytes, completions: Sequence[SeenCompletion]) -> float:
        """Return the surprise of a group outside the runs that it shares with kept texts or within itself."""
        kept = self._kept.get(problem, ())
        texts = [*(one.completion for one in kept), *completions]
        same = (one for one in self._searches if one.completions is completions and one.kept is kept)
        pairings = next((one.pairings for one in same if len(one.texts) == len(texts)), None)
        if pairings is None:
            pairings = similar(texts, num_before=len(kept))
        return new_nats(texts, pairings, num_before=len(kept))

    def find(self, sender: str, problem: bytes, completions: Sequence[SeenCompletion]) -> Copy | None:
        """Return the group from which too many long completions are copied; None if the group is not a copy.

        A node's own group never is. The surprise is the one that the first sender reported, because a copy may claim
        any value. For repetitions within one group it is that group's value. Copies of texts count only if the others
        are too few. The same list, without changes to it or to the problem's groups, is not searched again.
        """
        kept = self._kept.get(problem, ())
        for one in self._searches:
            if one.completions is completions and one.kept is kept and one.sender == sender:
                return one.copy
        long = [one for one in completions if len(one.ids) >= MIN_LONG_TOKENS]
        if sender == self._own_id or not long:
            return None
        known = [one for one in kept if one.has_surprise]
        texts = [*(one.completion for one in known), *long]
        pairings = similar(texts, num_before=len(known))
        origins = [*(one.origin for one in known), *(Origin(sender) for _ in long)]
        copy = self._copy_of(texts, origins, first_copied(texts, pairings, nats=MIN_EVIDENCE_NATS), num_new=len(long))
        self._searches.append(_Search(sender, completions, kept, texts, pairings, copy))
        return copy

    def _copy_of(
        self, texts: Sequence[SeenCompletion], origins: Sequence[Origin], copied: dict[int, int], *, num_new: int
    ) -> Copy | None:
        """Return the group of most of the texts that were `copied`; None if these are few of the `num_new` ones."""
        most = MAX_COPIED_FRACTION * num_new
        if len(copied) <= most:
            return None
        exact = {place: text for place, text in copied.items() if not texts[text].is_text}
        is_text = texts[-1].is_text or len(exact) <= most
        firsts, num_twice = Counter[Origin](), 0
        for place, text in (copied if is_text else exact).items():
            firsts[origins[text]] += 1
            num_twice += _has_surprise(texts[place])
        own = [first for first in firsts if first.sender == self._own_id]
        is_of_own = sum(firsts[first] for first in own) > most
        return Copy(own[0] if is_of_own else max(firsts, key=firsts.__getitem__), num_twice > most, is_text)

    def remember(self, origin: Origin, problem: bytes, completions: Sequence[SeenCompletion]) -> None:
        """Keep the completions of an accepted group. Equal ones keep their first origin."""
        kept = self._kept.pop(problem, [])
        known = {one.ids_hash for one in kept}
        added = [
            _Kept(one.to_keep(), origin, ids_hash, _has_surprise(one))
            for one in completions
            if (ids_hash := hash(one.ids.tobytes())) not in known
        ]
        self.num_bytes += sum(one.num_bytes for one in added)
        self._kept[problem] = kept = [*kept, *added]
        self._drop(kept, len(kept) - MAX_PER_PROBLEM)
        while self.num_bytes > MAX_HISTORY_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._drop(oldest, len(oldest))

    def forget(self, group_id: bytes, problem: bytes) -> None:
        """Drop the completions of a group, because an equal one is the original."""
        if problem in self._kept:
            kept = sorted(self._kept[problem], key=lambda one: one.origin.group_id != group_id)
            self._drop(kept, sum(one.origin.group_id == group_id for one in kept))
            self._kept[problem] = kept

    def _drop(self, kept: list[_Kept], count: int) -> None:
        self.num_bytes -= sum(one.num_bytes for one in kept[: max(0, count)])
        del kept[: max(0, count)]
