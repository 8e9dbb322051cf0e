"""Finds equal runs of tokens in completions of one problem: which texts to compare, at which shifts.

Two texts are compared at shift 0 if most of their tokens at equal positions are equal. At other shifts they are
compared if they share anchors: the windows with the smallest hash among `SPAN` successive ones ("winnowing"). So each
equal run of `SPAN + WINDOW - 1` tokens has an anchor, and a run of `WINDOW` tokens often has one. The hash has a secret
of this node. A sender that changes tokens does not know which windows are anchors.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]


RUN_NATS = 3.0  # for the end of a run
GAP_NATS = RUN_NATS + math.log(2.0)  # the least price of a run after other tokens
WINDOW = 3  # tokens
SPAN = 8  # successive windows, of which one is an anchor; a power of 2
MIN_SHIFTS, MAX_SHIFTS = 3, 16  # between two texts, besides 0; beyond the first ones, those with several anchors
MAX_LINKS = 8  # runs before a run to which a chain may lead from it
MAX_RUNS = 128  # of two texts, at all shifts: those with most surprise
MAX_COMPARED = 4  # known texts for a completion: the most similar at shift 0, and as many by anchors
MAX_PAIRS = 1 << 16  # of a window and an equal anchor, in one search; of more, evenly spaced ones
MIN_COMMON = 0.9  # fraction of the tokens of a copy sent as text: its likely part may be equal by chance
MAX_TOKEN_NATS = 2.0  # of one token, in `new_nats`
NO_HASH = np.uint64(2**64 - 1)
TABLE_SHIFT = np.uint64(48)
MAX_SHIFT = 1 << 19


class SeenCompletion(NamedTuple):
    """The first token ids int32 `[T]` of a completion, and their surprise float32 `[T]` in nats.

    `is_text`: it arrived as text, and only the mean of the surprise is known.
    """

    ids: NDArray[np.int32]
    nats: NDArray[np.float32]
    is_text: bool = False


class Text(NamedTuple):
    """A completion that others are compared with, and the hashes of its anchors at `places`."""

    completion: SeenCompletion
    anchors: Hashes
    places: Places


class Pairing(NamedTuple):
    """A completion and a text by their places, and how far the text's tokens are moved in the completion."""

    completion: int
    text: int
    shift: int


class Similarity:
    """Search for similar texts. The hash has a random secret."""

    def __init__(self) -> None:
        self._multipliers = [np.uint64(secrets.randbits(64) | 1) for _ in range(2)]

    def texts_of(self, completions: Sequence[SeenCompletion]) -> list[Text]:
        """Return completions with their anchors."""
        margin = SPAN - 1  # before and after each one, so that a span has windows of one completion only
        windows = self._windows_of(completions)
        begins = np.cumsum([margin, *(len(one) + margin for one in windows)])
        hashes = np.full(begins[-1], NO_HASH)
        for begin, one in zip(begins, windows, strict=False):
            hashes[begin : begin + len(one)] = one
        lowest = _slide(np.maximum, _slide(np.minimum, hashes))  # the largest minimum of the spans with a window
        at = margin + np.flatnonzero((lowest == hashes[margin : len(hashes) - margin]) & (lowest != NO_HASH))
        found = np.split(at, np.searchsorted(at, begins[1:-1]))
        return [
            Text(one, hashes[places], places - begin)
            for one, places, begin in zip(completions, found, begins, strict=False)
        ]

    def similar(
        self, completions: Sequence[SeenCompletion], before: Sequence[Text]
    ) -> tuple[list[Text], list[Pairing]]:
        """Return the texts, and the pairings of a completion with an earlier text that are worth a comparison.

        The completions themselves follow the texts `before` them.
        """
        texts = [*before, *self.texts_of(completions)]
        found = {*self._by_anchors(completions, texts, num_before=len(before))}
        found |= {*_by_position([one.completion for one in texts], num_before=len(before))}
        return texts, sorted(found)

    def _windows_of(self, completions: Sequence[SeenCompletion]) -> list[Hashes]:
        """Return the hashes of all `WINDOW` successive ids by completion; a collision costs only a comparison."""
        ids = np.concatenate([np.zeros(0, dtype=np.int32), *(one.ids for one in completions)]).astype(np.uint64)
        count = max(0, len(ids) - WINDOW + 1)
        hashes = np.zeros(count, dtype=np.uint64)
        for at in range(WINDOW):
            hashes *= self._multipliers[0]
            hashes += ids[at : at + count]
        hashes ^= hashes >> np.uint64(32)
        hashes *= self._multipliers[1]
        ends = np.cumsum([len(one.ids) for one in completions]).tolist()
        return [
            hashes[end - len(one.ids) : max(end - len(one.ids), end - WINDOW + 1)]
            for one, end in zip(completions, ends, strict=True)
        ]

    def _by_anchors(
        self, completions: Sequence[SeenCompletion], texts: Sequence[Text], *, num_before: int
    ) -> list[Pairing]:
        """Return the pairings of each completion with the texts and at the shifts of most equal anchors."""
        windows_of, firsts = self._windows_of(completions), texts[:-1]
        windows = np.concatenate(windows_of)
        ends = np.cumsum([len(one) for one in windows_of])
        begins = ends - [len(one) for one in windows_of]
        anchors = np.concatenate([windows[:0], *(text.anchors for text in firsts)])
        is_present = np.zeros(1 << (64 - int(TABLE_SHIFT)), dtype=bool)
        is_present[windows >> TABLE_SHIFT] = True
        likely = np.flatnonzero(is_present[anchors >> TABLE_SHIFT])  # to search for few of the anchors only
        if not len(likely):
            return []
        owners = np.repeat(np.arange(len(firsts)), [len(text.anchors) for text in firsts])[likely]
        places = np.concatenate([text.places for text in firsts])[likely]
        order = np.argsort(windows, kind="stable")
        holder = np.searchsorted(ends, order, side="right")
        is_first = np.ones(len(order), dtype=bool)  # of equal windows of one completion
        is_first[1:] = (windows[order[1:]] != windows[order[:-1]]) | (holder[1:] != holder[:-1])
        order, holder = order[is_first], holder[is_first]
        anchor, window = _pairs(anchors[likely], windows[order])
        is_before = owners[anchor] < num_before + holder[window]
        anchor, window = anchor[is_before], window[is_before]
        place = holder[window]
        return _most_common(place, owners[anchor], order[window] - begins[place] - places[anchor])


def _slide(pick: np.ufunc, values: Hashes) -> Hashes:
    width = 1
    while width < SPAN:
        values = pick(values[:-width], values[width:])
        width *= 2
    return values


def _pairs(anchors: Hashes, windows: Hashes) -> tuple[Places, Places]:
    """Return the indices of pairs of an anchor and an equal window, at most `MAX_PAIRS`; `windows` are sorted."""
    begins = np.searchsorted(windows, anchors)
    stops = np.searchsorted(windows, anchors, side="right")
    ends = np.cumsum(stops - begins)
    pairs = np.arange(0, ends[-1], 1 + ends[-1] // MAX_PAIRS)
    anchor = np.searchsorted(ends, pairs, side="right")
    return anchor, stops[anchor] - ends[anchor] + pairs


def _most_common(places: Places, texts: Places, shifts: Places) -> list[Pairing]:
    """Return pairings of each place with the `MAX_COMPARED` texts of most votes, and their most common shifts."""
    keys, votes = np.unique((places << 40) + (texts << 20) + (shifts + MAX_SHIFT), return_counts=True)
    if not len(keys):
        return []
    starts = np.flatnonzero(np.diff(keys >> 20, prepend=-1))  # of the keys of a place and text
    most, place = np.add.reduceat(votes * votes, starts), keys[starts] >> 40
    order = np.lexsort((-most, place))
    rank = np.arange(len(order)) - np.searchsorted(place[order], place[order])
    stops = np.append(starts[1:], len(keys))
    found = []
    for at in order[rank < MAX_COMPARED].tolist():
        of_text = slice(starts[at], stops[at])
        best = np.argsort(-votes[of_text], kind="stable")[:MAX_SHIFTS]
        best = best[: max(MIN_SHIFTS, np.count_nonzero(votes[of_text][best] > 1))]
        found += [
            Pairing(key >> 40, (key >> 20) % (1 << 20), key % (1 << 20) - MAX_SHIFT)
            for key in keys[of_text][best].tolist()
        ]
    return found


def _by_position(completions: Sequence[SeenCompletion], *, num_before: int) -> list[Pairing]:
    """Return pairings of each completion with the texts that have most equal tokens at equal positions."""
    table = np.full((len(completions), max((len(one.ids) for one in completions), default=0)), -1, dtype=np.int32)
    for row, one in zip(table, completions, strict=True):
        row[: len(one.ids)] = one.ids
    found = []
    for place, one in enumerate(completions[num_before:]):
        counts = np.count_nonzero(table[: num_before + place, : len(one.ids)] == one.ids, axis=1)
        best = np.argsort(-counts, kind="stable")[:MAX_COMPARED].tolist()
        found += [Pairing(place, text, 0) for text in best if counts[text]]
    return found


def first_copied(
    completions: Sequence[SeenCompletion], texts: Sequence[Text], pairings: Sequence[Pairing], *, nats: float
) -> dict[int, int]:
    """Return, by place of each completion that is a copy with an evidence of `nats`, the place of its first text."""
    found: dict[int, int] = {}
    for (place, text), group in groupby(_likely(completions, texts, pairings, nats=nats), key=lambda one: one[:2]):
        shifts, first, again = [one.shift for one in group], texts[text].completion, completions[place]
        if place in found or ((first.is_text or again.is_text) and _common_fraction(first.ids, again.ids) < MIN_COMMON):
            continue
        if evidence(first, again.ids, shifts) >= nats:
            found[place] = text
    return found


def _common_fraction(first: NDArray[np.int32], again: NDArray[np.int32]) -> float:
    """Return the fraction of the tokens of the longer text that the other one has, too, in any order."""
    common = Counter(first.tolist()) & Counter(again.tolist())
    return common.total() / max(len(first), len(again))


def _likely(
    completions: Sequence[SeenCompletion], texts: Sequence[Text], pairings: Sequence[Pairing], *, nats: float
) -> list[Pairing]:
    """Return the pairings whose evidence may reach `nats`, by an upper bound."""
    of_each = groupby(pairings, key=lambda one: one.completion)
    return [one for _, group in of_each for one in _likely_of_one(completions, texts, [*group], nats=nats)]


def _likely_of_one(
    completions: Sequence[SeenCompletion], texts: Sequence[Text], pairings: Sequence[Pairing], *, nats: float
) -> list[Pairing]:
    """Do the work of `_likely` for the pairings of one completion, all at once."""
    in_first, in_again, surprises, from_start = [], [], [], []
    for place, text, shift in pairings:
        first, again = texts[text].completion, completions[place].ids
        begin, end = _common_part(len(first.ids), len(again), shift)
        in_first.append(first.ids[begin:end])
        in_again.append(again[begin + shift : end + shift])
        surprises.append(first.nats[begin:end])
        from_start.append(begin == 0)
    is_equal = np.concatenate(in_first) == np.concatenate(in_again)
    ends = np.cumsum([len(part) for part in in_first])
    begins = np.append(0, ends[:-1])
    is_start = is_equal.copy()
    is_start[1:] &= ~is_equal[:-1]
    is_start[begins[begins < len(is_equal)]] = is_equal[begins[begins < len(is_equal)]]
    starts = np.flatnonzero(is_start)
    if not len(starts):
        return []
    owner = np.searchsorted(ends, starts, side="right")
    is_first_run = (starts == begins[owner]) & np.array(from_start)[owner]
    sums = np.add.reduceat(np.where(is_equal, np.concatenate(surprises), 0.0), starts)
    gains = np.maximum(0.0, sums - np.where(is_first_run, 0.0, GAP_NATS))
    bounds: defaultdict[tuple[int, int], float] = defaultdict(float)
    for one, gain in zip(pairings, np.bincount(owner, gains, len(pairings)).tolist(), strict=True):
        bounds[one.completion, one.text] += gain
    return [one for one in pairings if bounds[one.completion, one.text] >= nats]


class _Run(NamedTuple):
    """Equal tokens of two texts: `begin` to `end` in the first, moved by `shift` in the second."""

    begin: int
    end: int
    shift: int


def evidence(first: SeenCompletion, again: NDArray[np.int32], shifts: Iterable[int]) -> float:
    """Return the evidence, in nats, that the token ids `again` are a copy of `first`, with tokens moved by `shifts`.

    That is the best chain of runs that are in the same order in both texts.
    """
    sums_array = np.append(0.0, np.cumsum(first.nats, dtype=np.float64))
    sums, best = sums_array.tolist(), 0.0
    last = deque[tuple[_Run, float]](maxlen=MAX_LINKS)  # the chains that end with the last runs
    for run in _runs(first, again, shifts, sums_array):
        found = -math.inf
        for before, nats in (*last, (_Run(0, 0, 0), 0.0)):
            moved = run.shift - before.shift
            begin = max(run.begin, before.end, before.end - moved)  # a token counts once in each text
            if begin >= run.end or nats + sums[run.end] - sums[begin] <= found:
                continue
            gap = begin - before.end
            if gap or moved or before.end:
                nats -= RUN_NATS + (_price_of_move(abs(moved), len(again)) if moved else 0.0)
                nats -= math.log((gap + bool(moved)) * (gap + bool(moved) + 1) or 1)
            found = max(found, nats + sums[run.end] - sums[begin])
        last.appendleft((run, found))
        best = max(best, found)
    return best


def _runs(
    first: SeenCompletion, again: NDArray[np.int32], shifts: Iterable[int], sums: NDArray[np.float64]
) -> list[_Run]:
    """Return the `MAX_RUNS` runs with most surprise, if it exceeds the least price of a run, in order.

    `sums` are the sums of the surprise of the tokens before each one. Of equal runs the least moved ones come first.
    """
    begins, ends, moved = [], [], []
    for shift in sorted(shifts, key=abs):
        begin, end = _common_part(len(first.ids), len(again), shift)
        is_equal = np.zeros(end - begin + 2, dtype=np.int8)  # with an unequal token before and after
        is_equal[1:-1] = first.ids[begin:end] == again[begin + shift : end + shift]
        edges = begin + np.flatnonzero(np.diff(is_equal))
        begins.append(edges[::2])
        ends.append(edges[1::2])
        moved.append(np.full(len(edges) // 2, shift))
    runs = np.stack([np.concatenate(begins), np.concatenate(ends), np.concatenate(moved)], axis=1)
    surprise = sums[runs[:, 1]] - sums[runs[:, 0]]
    is_free = (runs[:, 0] == 0) & (runs[:, 2] == 0)
    is_enough = surprise > np.where(is_free, 0.0, GAP_NATS)
    most = np.argsort(-surprise[is_enough], kind="stable")[:MAX_RUNS]
    return sorted(_Run(*run) for run in runs[is_enough][most].tolist())


def _price_of_move(distance: int, num_tokens: int) -> float:
    return math.log(min(2 * distance * (distance + 1), 4 * num_tokens))


def _common_part(num_first: int, num_again: int, shift: int) -> tuple[int, int]:
    """Return begin and end of the tokens of the first text that have one in the other at this shift."""
    begin = max(0, -shift)
    return begin, max(begin, min(num_first, num_again - shift))


def new_nats(completions: Sequence[SeenCompletion], texts: Sequence[Text], pairings: Sequence[Pairing]) -> float:
    """Return the surprise of the tokens outside the runs shared with `texts`, with a limit for each token.

    Each part of a completion outside the runs counts without its first token, which any change of a copy makes.
    """
    is_shared = [np.zeros(len(one.ids) + 1, dtype=bool) for one in completions]
    for place, text, shift in pairings:
        first, again = texts[text].completion.ids, completions[place].ids
        begin, end = _common_part(len(first), len(again), shift)
        is_equal = np.zeros(end - begin + 2, dtype=bool)
        is_equal[1:-1] = first[begin:end] == again[begin + shift : end + shift]
        is_run = is_equal[1:-1] & (is_equal[:-2] | is_equal[2:]) if shift else is_equal[1:-1]
        is_shared[place][begin + shift : end + shift] |= is_run
    return sum(map(_new_nats_of, completions, is_shared))


def _new_nats_of(completion: SeenCompletion, is_shared: NDArray[np.bool_]) -> float:
    """Return the surprise of the tokens that are not shared and do not follow a shared one."""
    is_new = ~is_shared[:-1]
    if not is_new.all():
        is_new &= ~np.append(True, is_shared[:-2])
    return float(np.minimum(completion.nats[is_new], MAX_TOKEN_NATS).sum())
