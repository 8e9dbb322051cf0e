"""Finds equal runs of tokens in completions of one problem: which texts to compare, at which shifts.

Two texts are compared at shift 0 if most of their tokens at equal positions are equal. At other shifts they are
compared if they share windows of `WINDOW` tokens, at the shifts of most of these.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]


RUN_NATS = 3.0  # for the end of a run
GAP_NATS = RUN_NATS + math.log(2.0)  # the least price of a run after other tokens
WINDOW = 3  # tokens
MIN_SHIFTS, MAX_SHIFTS = 3, 16  # between two texts, besides 0; beyond the first ones, those with several windows
MAX_LINKS = 8  # runs before a run to which a chain may lead from it
MAX_COMPARED = 4  # known texts for a completion: the most similar at shift 0, and as many by windows
MAX_PAIRS = 1 << 16  # of equal windows, in one search
MIN_COMMON = 0.9  # fraction of the tokens of a copy sent as text: its likely part may be equal by chance
MAX_TOKEN_NATS = 2.0  # of one token, in `new_nats`
MULTIPLIERS = [np.uint64(secrets.randbits(64) | 1) for _ in range(2)]  # of the hash of a window; a secret
TABLE_SHIFT = np.uint64(44)  # hashes with equal first 20 bits are compared
MAX_SHIFT = 1 << 19


class SeenCompletion(NamedTuple):
    """The first token ids int32 `[T]` of a completion, and their surprise float32 `[T]` in nats.

    `is_text`: it arrived as text, and only the mean of the surprise is known.
    """

    ids: NDArray[np.int32]
    nats: NDArray[np.float32]
    is_text: bool = False


class Pairing(NamedTuple):
    """A completion and a text by their places, and how far the text's tokens are moved in the completion."""

    completion: int
    text: int
    shift: int


def similar(
    completions: Sequence[SeenCompletion], before: Sequence[SeenCompletion]
) -> tuple[list[SeenCompletion], list[Pairing]]:
    """Return the texts, and the pairings of a completion with an earlier text that are worth a comparison.

    The completions themselves follow the texts `before` them.
    """
    texts = [*before, *completions]
    found = {*_by_windows(texts, num_before=len(before)), *_by_position(texts, num_before=len(before))}
    return texts, sorted(found)


def _windows_of(ids: NDArray[np.int32]) -> Hashes:
    """Return the hash of the `WINDOW` ids from each place on; a collision costs only a comparison."""
    count = max(0, len(ids) - WINDOW + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for at in range(WINDOW):
        hashes *= MULTIPLIERS[0]
        hashes += ids[at : at + count].astype(np.uint64)
    hashes ^= hashes >> np.uint64(32)
    hashes *= MULTIPLIERS[1]
    return hashes


def _by_windows(texts: Sequence[SeenCompletion], *, num_before: int) -> list[Pairing]:
    """Return the pairings of each completion with the texts and at the shifts of most equal windows."""
    ends = np.cumsum([len(one.ids) for one in texts])
    begins = np.append(0, ends[:-1])
    hashes = _windows_of(np.concatenate([one.ids for one in texts]))
    is_present = np.zeros(1 << (64 - int(TABLE_SHIFT)), dtype=bool)
    is_present[hashes[begins[num_before] :] >> TABLE_SHIFT] = True
    places = np.flatnonzero(is_present[hashes >> TABLE_SHIFT])  # to sort and search for few of the windows only
    owners = np.searchsorted(ends, places, side="right")
    is_whole = places + WINDOW <= ends[owners]
    places, owners = places[is_whole], owners[is_whole]
    first_new = np.searchsorted(owners, num_before)
    order = first_new + np.argsort(hashes[places[first_new:]], kind="stable")
    again, holders = places[order], owners[order]
    windows = hashes[again]
    is_first = np.ones(len(windows), dtype=bool)  # of equal windows of one completion
    is_first[1:] = (windows[1:] != windows[:-1]) | (holders[1:] != holders[:-1])
    again, holders, windows = again[is_first], holders[is_first], windows[is_first]
    first, found = _pairs(hashes[places], windows)
    is_before = owners[first] < holders[found]
    first, found = first[is_before], found[is_before]
    shifts = (again - begins[holders])[found] - (places - begins[owners])[first]
    return _most_common(holders[found] - num_before, owners[first], shifts)


def _pairs(firsts: Hashes, windows: Hashes) -> tuple[Places, Places]:
    """Return the indices of pairs of equal hashes, about `MAX_PAIRS` at most; `windows` are sorted."""
    begins = np.searchsorted(windows, firsts)
    counts = np.searchsorted(windows, firsts, side="right") - begins
    chosen = np.arange(0, len(firsts), 1 + counts.sum() // MAX_PAIRS)
    begins, counts = begins[chosen], counts[chosen]
    return np.repeat(chosen, counts), np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)


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
    completions: Sequence[SeenCompletion], texts: Sequence[SeenCompletion], pairings: Sequence[Pairing], *, nats: float
) -> dict[int, int]:
    """Return, by place of each completion that is a copy with an evidence of `nats`, the place of its first text."""
    found: dict[int, int] = {}
    for (place, text), group in groupby(pairings, key=lambda one: one[:2]):
        shifts, first, again = [one.shift for one in group], texts[text], completions[place]
        if place in found or ((first.is_text or again.is_text) and _common_fraction(first.ids, again.ids) < MIN_COMMON):
            continue
        if evidence(first, again.ids, shifts) >= nats:
            found[place] = text
    return found


def _common_fraction(first: NDArray[np.int32], again: NDArray[np.int32]) -> float:
    """Return the fraction of the tokens of the longer text that the other one has, too, in any order."""
    common = Counter(first.tolist()) & Counter(again.tolist())
    return common.total() / max(len(first), len(again))


class _Run(NamedTuple):
    """Equal tokens of two texts: `begin` to `end` in the first, moved by `shift` in the second."""

    begin: int
    end: int
    shift: int


def evidence(first: SeenCompletion, again: NDArray[np.int32], shifts: Iterable[int]) -> float:
    """Return the evidence, in nats, that the token ids `again` are a copy of `first`, with tokens moved by `shifts`.

    That is the best chain of runs that are in the same order in both texts.
    """
    sums = np.append(0.0, np.cumsum(first.nats, dtype=np.float64)).tolist()
    chains = [(_Run(0, 0, 0), 0.0)]
    for run in sorted(_runs(first, again, shifts)):
        found = -math.inf
        for before, nats in (chains[0], *chains[1:][-MAX_LINKS:]):
            moved = run.shift - before.shift
            begin = max(run.begin, before.end, before.end - moved)  # a token counts once in each text
            gap = begin - before.end
            if gap or moved or before.end:
                nats -= RUN_NATS + (_price_of_move(abs(moved), len(again)) if moved else 0.0)
                nats -= math.log((gap + bool(moved)) * (gap + bool(moved) + 1) or 1)
            found = max(found, nats + sums[run.end] - sums[begin] if begin < run.end else -math.inf)
        chains.append((run, found))
    return max(nats for _, nats in chains)


def _runs(first: SeenCompletion, again: NDArray[np.int32], shifts: Iterable[int]) -> Iterator[_Run]:
    """Yield the runs with more surprise than the least price of a run."""
    for shift in shifts:
        begin, end = _common_part(len(first.ids), len(again), shift)
        is_equal = np.zeros(end - begin + 2, dtype=np.int8)  # with an unequal token before and after
        is_equal[1:-1] = first.ids[begin:end] == again[begin + shift : end + shift]
        edges = begin + np.flatnonzero(np.diff(is_equal))
        for start, stop in edges.reshape(-1, 2).tolist():
            if first.nats[start:stop].sum() > (GAP_NATS if start or shift else 0.0):
                yield _Run(start, stop, shift)


def _price_of_move(distance: int, num_tokens: int) -> float:
    return math.log(min(2 * distance * (distance + 1), 4 * num_tokens))


def _common_part(num_first: int, num_again: int, shift: int) -> tuple[int, int]:
    """Return begin and end of the tokens of the first text that have one in the other at this shift."""
    begin = max(0, -shift)
    return begin, max(begin, min(num_first, num_again - shift))


def new_nats(
    completions: Sequence[SeenCompletion], texts: Sequence[SeenCompletion], pairings: Sequence[Pairing]
) -> float:
    """Return the surprise of the tokens outside the runs shared with `texts`, with a limit for each token.

    Each part of a completion outside the runs counts without its first token, which any change of a copy makes.
    """
    is_shared = [np.zeros(len(one.ids) + 1, dtype=bool) for one in completions]
    for place, text, shift in pairings:
        first, again = texts[text].ids, completions[place].ids
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
