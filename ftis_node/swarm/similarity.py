"""Finds equal runs of tokens in completions of one problem: which texts to compare, at which shifts.

Two texts are compared at shift 0 if most of their tokens at equal positions are equal. At other shifts they are
compared if they share windows of `WINDOW` tokens, at the shifts of most of these. Of a kept text only anchors are
searched: a secret hash selects one of `SPAN` successive windows. So each equal run of `2 * SPAN + WINDOW - 2` tokens
has an anchor, and a run of `WINDOW` tokens often has one. A sender that changes tokens does not know the anchors.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

RUN_NATS = 3.0  # for the end of a run
GAP_NATS = RUN_NATS + math.log(2.0)  # the least price of a run after other tokens
WINDOW = 3  # tokens
SPAN = 4  # successive windows of a kept text, of which one is an anchor
MAX_SHIFTS = 16  # between two texts, besides 0; beyond the first one, those with several windows
MAX_LINKS = 8  # runs before a run to which a chain may lead from it
MAX_RUNS = 128  # of two texts, at all shifts: those with most gain
MAX_COMPARED = 4  # kept texts for a completion, and as many of its group: by windows, and as many at shift 0
MAX_PAIRS = 1 << 16  # of equal windows, in one search; of more, evenly spaced ones
MAX_AT_ONCE = 1 << 17  # tokens compared at once at shift 0
MIN_EQUAL = 16  # one of so many tokens is equal at shift 0
MAX_PAIRINGS_AT_ONCE = 256  # about
MIN_COMMON = 0.9  # fraction of the tokens of a copy sent as text: its likely part may be equal by chance
MAX_TOKEN_NATS = 2.0  # of one token, in `new_nats`
MULTIPLIERS = np.array([secrets.randbits(64) | 1 for _ in range(2)], dtype=np.uint64)  # of the hash of a window
HASH_BITS, SLOT_BITS = 31, 16  # slots are the first bits of hashes
FIELD_BITS = 20
MAX_SHIFT = 1 << (FIELD_BITS - 1)


class SeenCompletion(NamedTuple):
    """The first token ids int32 `[T]` of a completion, and their surprise float32 `[T]` in nats.

    `windows` are hashes of `WINDOW` successive ids, int64 `[W]`, and `places` where these begin, int64 `[W]`.
    `is_text`: it arrived as text, and only the mean of the surprise is known.
    """

    ids: NDArray[np.int32]
    nats: NDArray[np.float32]
    windows: Places
    places: Places
    is_text: bool = False

    def to_keep(self) -> SeenCompletion:
        """Return a copy of a completion with all windows that has only its anchors."""
        offsets = self.windows[::SPAN] % SPAN
        anchors = np.minimum(self.places[::SPAN] + offsets, len(self.windows) - 1)
        return SeenCompletion(self.ids.copy(), self.nats.copy(), self.windows[anchors], anchors, self.is_text)


def seen_completions(
    ids: NDArray[np.int32], nats: NDArray[np.float32], lengths: Sequence[int], *, most: int, is_text: bool = False
) -> list[SeenCompletion]:
    """Return the first `most` tokens of each completion with all windows; the completions are one after the other."""
    hashes = np.zeros(max(0, len(ids) - WINDOW + 1), dtype=np.uint64)
    for at in range(WINDOW):
        hashes *= MULTIPLIERS[0]
        hashes += ids[at : at + len(hashes)].astype(np.uint64)
    hashes ^= hashes >> np.uint64(32)
    hashes *= MULTIPLIERS[1]
    windows = (hashes >> np.uint64(64 - HASH_BITS)).astype(np.int64)  # a collision costs only a comparison
    places, found, begin = np.arange(most), [], 0
    for length in lengths:
        size = min(length, most)
        num_windows = max(0, size - WINDOW + 1)
        tokens, starts = slice(begin, begin + size), slice(begin, begin + num_windows)
        found.append(SeenCompletion(ids[tokens], nats[tokens], windows[starts], places[:num_windows], is_text))
        begin += length
    return found


def pairings_of(completions: Places, texts: Places, shifts: Places) -> Places:
    """Return one integer for each completion, earlier text, and shift of the text's tokens in the completion."""
    return (completions << 2 * FIELD_BITS) + (texts << FIELD_BITS) + shifts + MAX_SHIFT


def _fields(pairings: Places) -> tuple[Places, Places, Places]:
    mask = (1 << FIELD_BITS) - 1
    return pairings >> 2 * FIELD_BITS, (pairings >> FIELD_BITS) & mask, (pairings & mask) - MAX_SHIFT


def similar(texts: Sequence[SeenCompletion], *, num_before: int) -> Places:
    """Return the pairings worth a comparison, in order, of each text after the first `num_before` with earlier ones.

    Those before have anchors, and the others all windows.
    """
    found = [_by_windows(texts, num_before=num_before), *_by_position(texts, num_before=num_before)]
    return np.unique(np.concatenate(found)) if any(map(len, found)) else found[0]


def _by_windows(texts: Sequence[SeenCompletion], *, num_before: int) -> Places:
    """Return the pairings of each completion with the texts and at the shifts of most equal windows."""
    hashes = np.concatenate([one.windows for one in texts])
    ends = np.cumsum([len(one.windows) for one in texts])
    found = _shared(hashes, first_new=int(ends[num_before]) - len(texts[num_before].windows))
    keys = np.sort((hashes[found] << 32) + found)  # by hash, text and place
    is_same = keys[1:] >> 32 == keys[:-1] >> 32
    if not is_same.any():
        return found[:0]
    is_start, ranks = np.append(True, ~is_same), np.arange(len(keys))
    found = keys & ((1 << 32) - 1)
    owners = np.searchsorted(ends, found, side="right")
    is_again = (is_start | (np.diff(owners, prepend=-1) != 0)) & (owners >= num_before)  # the first in its text
    again, first = _pairs(ranks[is_again], np.maximum.accumulate(np.where(is_start, ranks, 0))[is_again])
    places = np.concatenate([one.places for one in texts])[found]
    pairings = pairings_of(owners[again], owners[first], places[again] - places[first])
    return _most_common(pairings, num_before=num_before)


def _shared(hashes: Places, *, first_new: int) -> Places:
    """Return the places of hashes that occur several times, and from `first_new` on, and of a few other ones."""
    slots = hashes >> (HASH_BITS - SLOT_BITS)
    is_new, is_shared = np.zeros(1 << SLOT_BITS, dtype=bool), np.zeros(1 << SLOT_BITS, dtype=bool)
    is_new[slots[first_new:]] = True
    likely = np.flatnonzero(is_new[slots])
    slots = slots[likely]
    ordered = np.sort(slots.astype(np.uint16), kind="stable")  # the radix sort, the fastest one
    is_shared[ordered[1:][ordered[1:] == ordered[:-1]]] = True
    places: Places = likely[is_shared[slots]]
    return places


def _pairs(lasts: Places, firsts: Places) -> tuple[Places, Places]:
    """Return pairs of each of `lasts` with all integers from its one of `firsts` to it, at most `MAX_PAIRS`."""
    ends = np.cumsum(lasts - firsts)
    count = int(ends[-1]) if len(ends) else 0
    pairs = np.arange(0, count, 1 + count // MAX_PAIRS)
    at = np.searchsorted(ends, pairs, side="right")
    return lasts[at], lasts[at] - ends[at] + pairs


def _most_common(pairings: Places, *, num_before: int) -> Places:
    """Return pairings of each completion with the texts of most votes, and their most common shifts."""
    found, votes = np.unique(pairings, return_counts=True)
    if not len(found):
        return found
    starts = np.flatnonzero(np.diff(found >> FIELD_BITS, prepend=-1))  # of the pairings of a completion and a text
    completions, texts, _ = _fields(found[starts])
    is_compared = _is_best(completions, texts, np.add.reduceat(votes * votes, starts), num_before=num_before)
    is_common = _ranks(found >> FIELD_BITS, votes) < np.where(votes > 1, MAX_SHIFTS, 1)
    return found[is_common & np.repeat(is_compared, np.diff(starts, append=len(found)))]


def _is_best(completions: Places, texts: Places, values: Places, *, num_before: int) -> NDArray[np.bool_]:
    """Return which of the texts are the `MAX_COMPARED` with the largest values for a completion, in order.

    Kept texts and those of its group are ranked apart. So a part that all texts of a group share hides no copy.
    """
    return _ranks(2 * completions + (texts >= num_before), values) < MAX_COMPARED


def _ranks(groups: Places, values: Places) -> Places:
    """Return the rank of each value in its group, 0 for the largest one. Equal groups follow one another."""
    ranks = np.empty(len(groups), dtype=np.int64)
    ranks[np.lexsort((-values, groups))] = np.arange(len(groups)) - np.searchsorted(groups, groups)
    return ranks


def _by_position(texts: Sequence[SeenCompletion], *, num_before: int) -> Iterator[Places]:
    """Yield pairings of each completion with the texts that have most equal tokens at equal positions.

    These are at least one of `MIN_EQUAL`: fewer, in runs too short for windows, have gaps that cost more than they add.
    """
    lengths = np.array([len(one.ids) for one in texts])
    table = np.full((len(texts), lengths.max()), -1, dtype=np.int32)
    for row, one in zip(table, texts, strict=True):
        row[: len(one.ids)] = one.ids
    new = table[num_before:, np.newaxis]
    new = np.where(new < 0, -2, new)
    places, step = np.arange(len(texts)), max(1, MAX_AT_ONCE // table.size)
    for begin in range(0, len(new), step):
        counts = (new[begin : begin + step] == table).sum(axis=2, dtype=np.int32)
        again = places[num_before + begin :][: len(counts), np.newaxis]
        rows, earlier = np.nonzero((counts * MIN_EQUAL >= lengths[again]) & (places < again))
        if len(rows):
            is_best = _is_best(rows, earlier, counts[rows, earlier], num_before=num_before)
            yield pairings_of(num_before + begin + rows[is_best], earlier[is_best], np.zeros_like(rows[is_best]))


def first_copied(texts: Sequence[SeenCompletion], pairings: Places, *, nats: float) -> dict[int, int]:
    """Return, by place of each completion that is a copy with an evidence of `nats`, the place of its first text."""
    found: dict[int, int] = {}
    for at_once in _split(pairings):
        runs, gains = runs_of(texts, at_once)
        pairs, starts = np.unique(runs[:, 0], return_index=True)
        limits = np.add.reduceat(gains, starts)
        for at in np.flatnonzero(limits >= nats).tolist():
            place, text = divmod(int(pairs[at]), 1 << FIELD_BITS)
            first, again = texts[text], texts[place]
            if place in found or ((first.is_text or again.is_text) and _common_fraction(first, again) < MIN_COMMON):
                continue
            of_pair = runs[:, 0] == pairs[at]
            if np.sort(gains[of_pair])[-MAX_RUNS:].sum() < nats:
                continue
            if evidence(first, len(again.ids), runs[of_pair], gains[of_pair]) >= nats:
                found[place] = text
    return found


def _split(pairings: Places) -> list[Places]:
    """Return parts of the pairings, each with all of its completions."""
    if not len(pairings):
        return []
    starts = np.flatnonzero(np.diff(pairings >> 2 * FIELD_BITS)) + 1
    return np.split(pairings, starts[np.diff(starts // MAX_PAIRINGS_AT_ONCE, prepend=0) > 0])


def _common_fraction(first: SeenCompletion, again: SeenCompletion) -> float:
    """Return the fraction of the tokens of the longer text that the other one has, too, in any order."""
    common = Counter(first.ids.tolist()) & Counter(again.ids.tolist())
    return common.total() / max(len(first.ids), len(again.ids))


def _equal_tokens(texts: Sequence[SeenCompletion], pairings: Places) -> tuple[Places, Places, Places]:
    """Return the equal tokens of the texts of each pairing: its index, and their places in all tokens of the texts."""
    ids, lengths = np.concatenate([one.ids for one in texts]), np.array([len(one.ids) for one in texts])
    begins = np.cumsum(lengths) - lengths
    again, first, shift = _fields(pairings)
    skipped = np.maximum(0, -shift)
    sizes = np.maximum(0, np.minimum(lengths[first], lengths[again] - shift) - skipped)
    ends = np.cumsum(sizes)
    in_first = np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins[first] + skipped - ends + sizes, sizes)
    distance = begins[again] - begins[first] + shift
    equal = np.flatnonzero(ids[in_first] == ids[in_first + np.repeat(distance, sizes)])
    index, in_first = np.searchsorted(ends, equal, side="right"), in_first[equal]
    return index, in_first, in_first + distance[index]


def _run_starts(index: Places, places: Places) -> Places:
    return np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(index, prepend=-1) != 0))


def runs_of(texts: Sequence[SeenCompletion], pairings: Places) -> tuple[Places, NDArray[np.float64]]:
    """Return the runs of equal tokens with more surprise than their least price, and the gain in nats of each one.

    A row `[4]` has the two texts as in a pairing, begin and end in the first one, and the shift.
    """
    index, places, _ = _equal_tokens(texts, pairings)
    starts = _run_starts(index, places)
    _, first, shift = _fields(pairings[index[starts]])
    lengths = np.array([len(one.ids) for one in texts])
    begin = places[starts] - (np.cumsum(lengths) - lengths)[first]
    nats = np.concatenate([one.nats for one in texts])[places].astype(np.float64)
    gains = np.add.reduceat(nats, starts) - np.where((begin == 0) & (shift == 0), 0.0, GAP_NATS)
    end = begin + np.diff(starts, append=len(places))
    runs = np.stack([pairings[index[starts]] >> FIELD_BITS, begin, end, shift], axis=1)
    return runs[gains > 0], gains[gains > 0]


class _Run(NamedTuple):
    """Equal tokens of two texts: `begin` to `end` in the first, moved by `shift` in the second."""

    begin: int
    end: int
    shift: int


def evidence(first: SeenCompletion, num_again: int, runs: Places, gains: NDArray[np.float64]) -> float:
    """Return the evidence, in nats, that a text of `num_again` tokens that shares `runs` with `first` is its copy.

    That is the best chain of runs that are in the same order in both texts, of the `MAX_RUNS` with most gain. Of equal
    runs the least moved ones come first.
    """
    sums, best = np.append(0.0, np.cumsum(first.nats, dtype=np.float64)).tolist(), 0.0
    most = runs[np.lexsort((np.abs(runs[:, 3]), -gains))[:MAX_RUNS], 1:]
    last = deque[tuple[_Run, float]](maxlen=MAX_LINKS)  # the chains that end with the last runs
    for run in sorted(_Run(*each) for each in most.tolist()):
        found = -math.inf
        for before, nats in (*last, (_Run(0, 0, 0), 0.0)):
            moved = run.shift - before.shift
            begin = max(run.begin, before.end, before.end - moved)  # a token counts once in each text
            if begin >= run.end or nats + sums[run.end] - sums[begin] <= found:
                continue
            gap = begin - before.end
            if gap or moved or before.end:
                nats -= RUN_NATS + (_price_of_move(abs(moved), num_again) if moved else 0.0)
                nats -= math.log((gap + bool(moved)) * (gap + bool(moved) + 1) or 1)
            found = max(found, nats + sums[run.end] - sums[begin])
        last.appendleft((run, found))
        best = max(best, found)
    return best


def _price_of_move(distance: int, num_tokens: int) -> float:
    return math.log(min(2 * distance * (distance + 1), 4 * num_tokens))


def new_nats(texts: Sequence[SeenCompletion], pairings: Places, *, num_before: int) -> float:
    """Return the surprise of the later texts outside the runs shared with earlier ones, with a limit for each token.

    Each part of a completion outside the runs counts without its first token, which any change of a copy makes.
    """
    lengths = np.array([len(one.ids) for one in texts])
    begins = np.cumsum(lengths) - lengths
    is_shared = np.zeros(lengths.sum(), dtype=bool)
    for at_once in _split(pairings):
        index, in_first, in_again = _equal_tokens(texts, at_once)
        starts = _run_starts(index, in_first)
        is_run = np.repeat(np.diff(starts, append=len(index)) > 1, np.diff(starts, append=len(index)))
        is_shared[in_again[is_run | (_fields(at_once[index])[2] == 0)]] = True
    follows = np.append(False, is_shared[:-1])
    follows[begins] = np.logical_or.reduceat(is_shared, begins)
    nats = np.minimum(np.concatenate([one.nats for one in texts[num_before:]]), MAX_TOKEN_NATS)
    return float(nats[~(is_shared | follows)[begins[num_before] :]].sum())
