"""Equal and nearly equal completions count as copies only if chance is ruled out, and the first announcement counts."""

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ftis_node.records.identity import Identity
from ftis_node.swarm import duplicates, similarity
from ftis_node.swarm.duplicates import (
    MAX_PER_PROBLEM,
    ORDER_MARGIN_S,
    Copy,
    DuplicateDetector,
    DuplicateKind,
    FirstAnnouncements,
    Origin,
    decide,
    describe,
)
from ftis_node.swarm.similarity import (
    MAX_LINKS,
    MAX_PAIRS,
    MAX_RUNS,
    SPAN,
    WINDOW,
    SeenCompletion,
)
from tests.conftest import make_completion, make_group

ANN, BOB, ME = Origin("ann", b"a", 1000.0), Origin("bob", b"b", 1001.0), Origin("me", b"m", 0.0)
RNG = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def short_texts_count(monkeypatch):
    monkeypatch.setattr(duplicates, "MIN_LONG_TOKENS", 8)
    monkeypatch.setattr(duplicates, "MAX_HISTORY_BYTES", 1 << 20)


def seen(ids: Any, nats: Any, **form: bool) -> SeenCompletion:
    return similarity.seen_completions(ids, nats, [len(ids)], most=1024, **form)[0]


def text(num_tokens: int = 44, *, nats: float = 1.0) -> SeenCompletion:
    """Return a completion of random tokens with this surprise of each."""
    return seen(RNG.integers(0, 1000, num_tokens, dtype=np.int32), np.full(num_tokens, nats, dtype=np.float32))


def with_ids(ids: list[int]) -> SeenCompletion:
    return seen(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.float32))


def changed(completion: SeenCompletion, *places: int) -> SeenCompletion:
    ids = completion.ids.copy()
    ids[list(places)] += 1000
    return seen(ids, completion.nats, is_text=completion.is_text)


def inserted(completion: SeenCompletion, *places: int) -> SeenCompletion:
    return with_ids(np.insert(completion.ids, list(places), 5000).tolist())


def cut(completion: SeenCompletion, begin: int, end: int) -> SeenCompletion:
    return seen(completion.ids[begin:end], completion.nats[begin:end])


def periodic(edit: str, one: SeenCompletion, every: int, *, front: int = 0) -> SeenCompletion:
    """Return a text with a change of each `every`-th token, and `front` tokens more at the start."""
    places = np.arange(every - 1, len(one.ids), every)
    ids = one.ids.copy()
    if edit == "change":
        ids[places] += 1000
    ids = {"insert": np.insert(ids, places, 5000), "delete": np.delete(ids, places)}.get(edit, ids)
    return with_ids([*[5000] * front, *ids.tolist()][:1024])


def found(copies: list[SeenCompletion], *known: SeenCompletion, origin: Origin = ANN, sender: str = "bob") -> bool:
    detector = DuplicateDetector("me")
    detector.remember(origin, b"sum/1", known)
    return detector.find(sender, b"sum/1", copies) is not None


@pytest.mark.parametrize(
    "edit",
    [
        lambda one: one, lambda one: changed(one, -1), lambda one: changed(one, 0), lambda one: changed(one, 20),
        lambda one: changed(one, 0, 15, 30), lambda one: changed(one, *range(10)), lambda one: inserted(one, 0),
        lambda one: inserted(one, *[0] * 12), lambda one: inserted(one, 22), lambda one: cut(one, 0, 30),
        lambda one: cut(one, 8, 44), lambda one: one._replace(nats=np.zeros(44, dtype=np.float32)),
    ],
    ids="equal last first middle three ten_first insert insert_12 insert_middle no_end no_begin no_surprise".split(),
)  # fmt: skip
def test_a_copy_with_a_few_other_tokens_is_a_copy(edit):  # type: ignore[no-untyped-def]
    texts = [text() for _ in range(4)]
    assert found([edit(one) for one in texts], *texts)
    assert not found([edit(one) for one in texts], *[text() for _ in range(4)])


@pytest.mark.parametrize("num_tokens", [1024, 760])
@pytest.mark.parametrize(
    ("edit", "every", "front"),
    [
        *(("change", every, 0) for every in (5, 6, 7, 8, 16, 64)),
        *(("change", every, 3) for every in (6, 8, 16, 64)),
        *((edit, every, 0) for edit in ("insert", "delete") for every in (16, 32, 64, 512)),
    ],
)
def test_a_long_text_with_changes_in_every_kth_token_is_a_copy(edit, every, front, num_tokens):
    texts, others = [text(num_tokens) for _ in range(2)], [text(num_tokens) for _ in range(20)]
    copies = [periodic(edit, one, every, front=front) for one in texts]
    assert found(copies, *others, *texts)
    assert not found(copies, *others)


@pytest.mark.parametrize("num_tokens", [1024, 760])
def test_no_place_hides_a_copy(num_tokens):
    """One token of each evenly spaced window of six differs, or a fixed one of each four in a shifted text."""
    one = text(num_tokens)
    windows = range(0, num_tokens - 5, (num_tokens - 5) // 16)
    assert found([changed(one, *(min(num_tokens - 1, begin + 3) for begin in windows))], one)
    one = text(num_tokens, nats=2.0)
    for phase in range(SPAN):
        ids = changed(one, *range(phase, num_tokens, SPAN)).ids.tolist()
        assert found([with_ids([5000, 5000, 5000, *ids[:-3]])], one)


@pytest.mark.parametrize("moved", [0, 1])
def test_a_part_that_all_copies_share_hides_none_of_them(moved):
    part, texts = text(300, nats=0.0).ids, [text(400) for _ in range(16)]
    copies = [with_ids([*[5000] * moved, *part, *one.ids[300:]]) for one in texts]
    assert found([one._replace(nats=np.zeros_like(one.nats)) for one in copies], *texts)


def test_each_run_of_a_kept_text_has_an_anchor_and_the_text_few():
    one = text(1024)
    anchors = one.to_keep().windows.tolist()
    assert len(anchors) == 1024 / SPAN
    for begin in range(1000):
        assert set(anchors) & set(cut(one, begin, begin + 2 * SPAN + WINDOW - 2).windows.tolist())


def evidence(first: SeenCompletion, again: SeenCompletion, shifts: range) -> float:
    pairings = similarity.pairings_of(
        np.ones(len(shifts), dtype=np.int64), np.zeros(len(shifts), dtype=np.int64), np.array(shifts)
    )
    return similarity.evidence(first, len(again.ids), *similarity.runs_of([first, again], pairings))


def test_the_work_for_texts_of_many_runs_is_bounded(monkeypatch):
    """Each second token is one constant, whose surprise is just above the least price of a run."""
    first, again = text(1024, nats=3.7), text(1024)
    first.ids[::2] = again.ids[::2] = 5000
    links, price = [], similarity._price_of_move
    monkeypatch.setattr(similarity, "_price_of_move", lambda *move: links.append(move) or price(*move))
    assert evidence(first, again, range(2, 34, 2)) < 20.0
    assert MAX_RUNS / 2 < len(links) <= MAX_RUNS * (MAX_LINKS + 1)


def test_the_pairs_of_windows_are_bounded_before_they_are_made():
    lasts, firsts = similarity._pairs(np.arange(3000), np.zeros(3000, dtype=np.int64))
    assert MAX_PAIRS / 2 < len(lasts) <= MAX_PAIRS
    assert (firsts < lasts).all() and lasts.max() > 2900
    lasts, firsts = similarity._pairs(np.array([2, 5, 7]), np.array([0, 5, 6]))
    assert [*zip(lasts.tolist(), firsts.tolist(), strict=True)] == [(2, 0), (2, 1), (7, 6)]
    assert not len(similarity._pairs(np.array([7]), np.array([7]))[0])


def test_a_copy_is_found_for_each_first_sender():
    for origin, sender, is_found in ((ANN, "bob", True), (ANN, "ann", True), (ME, "bob", True), (ANN, "me", False)):
        texts = [text(), text()]
        assert found([texts[0], text()], *texts, origin=origin, sender=sender) is is_found


def test_the_first_sender_of_a_completion_remains_its_author():
    detector, texts = DuplicateDetector("me"), [text() for _ in range(4)]
    detector.remember(ME, b"sum/1", texts[:1])
    detector.remember(BOB, b"sum/1", texts)  # too few copies to be refused
    copy = detector.find("cat", b"sum/1", texts[:1])
    assert copy.first == ME


def test_one_equal_completion_of_four_is_allowed_and_two_are_not():
    a, b = text(), text()
    assert not found([a, text(), text(), text()], a, b)
    assert found([a, b, text(), text()], a, b)


def test_short_and_likely_completions_never_count():
    short, likely = [text(7, nats=9.0)] * 4, [text(44, nats=0.4)] * 4
    assert not found(short, *short)
    assert not found(likely, *likely)
    assert found([text()] * 4), "equal completions within a group"


def test_the_history_is_bounded_and_drops_the_oldest():
    detector = DuplicateDetector("me")
    texts = [text(500) for _ in range(400)]
    for at, one in enumerate(texts):
        detector.remember(ANN, b"sum/%d" % at, [one])
    assert 0.99 < detector.num_bytes / (1 << 20) <= 1
    assert detector.find("bob", b"sum/399", [texts[399]]) is not None
    assert detector.find("bob", b"sum/0", [texts[0]]) is None
    detector.remember(ANN, b"one", [text(10) for _ in range(1000)])
    assert len(detector._kept[b"one"]) == MAX_PER_PROBLEM


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_the_history_counts_at_least_the_memory_that_it_takes(num_tokens):
    detector, begun = DuplicateDetector("me"), not tracemalloc.is_tracing()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(1000):
        group = [text(num_tokens) for _ in range(2)]
        detector.remember(Origin(f"ann {at}", at.to_bytes(32), float(at)), at.to_bytes(16), group)
    taken = tracemalloc.get_traced_memory()[0] - before
    if begun:
        tracemalloc.stop()
    assert 0.6 * detector.num_bytes < taken <= detector.num_bytes


def test_the_same_completions_are_searched_again_only_after_a_change_of_their_problem(monkeypatch):
    searches, first_copied = [], duplicates.first_copied
    monkeypatch.setattr(duplicates, "first_copied", lambda *a, **kw: searches.append(a) or first_copied(*a, **kw))
    detector, texts = DuplicateDetector("me"), [text()]
    changes = [lambda: None, lambda: detector.remember(ANN, b"other", texts)]
    for change in (*changes, lambda: detector.remember(ANN, b"sum/1", texts), *changes):
        change()
        copy = detector.find("bob", b"sum/1", texts)
        assert (copy is None) == (len(searches) == 1)
    detector.forget(b"a", b"sum/1")
    assert detector.find("bob", b"sum/1", texts) is None and len(searches) == 3


def test_a_forgotten_group_is_no_author():
    detector, texts = DuplicateDetector("me"), [text(), text()]
    detector.remember(ANN, b"sum/1", texts[:1])
    detector.remember(BOB, b"sum/1", texts[1:])
    detector.forget(b"a", b"sum/1")
    assert detector.num_bytes == detector._kept[b"sum/1"][0].num_bytes > 8 * 44
    assert detector.find("cat", b"sum/1", texts[:1]) is None
    assert detector.find("cat", b"sum/1", texts[1:]) is not None


@pytest.mark.parametrize(("num_words", "sharpness"), [(3, 1.0), (40, 3.0)])
def test_independent_samples_have_an_evidence_of_e_nats_in_at_most_e_to_the_minus_e_cases(num_words, sharpness):
    """Of two policies that prefer the same texts, one more than the other, as two siblings in training."""
    rng = np.random.default_rng(0)
    weights = rng.gumbel(size=(num_words, num_words)) * sharpness

    def sample(temperature):
        logprobs = weights / temperature
        logprobs -= np.logaddexp.reduce(logprobs, axis=1, keepdims=True)
        ids = [0]
        for _ in range(40):
            ids.append(int(np.argmax(logprobs[ids[-1]] + rng.gumbel(size=num_words))))
        return seen(np.array(ids[1:], dtype=np.int32), -logprobs[ids[:-1], ids[1:]].astype(np.float32))

    firsts, seconds = [sample(1.0) for _ in range(50)], [sample(0.7) for _ in range(50)]
    found = [evidence(one, other, range(-2, 3)) for one in firsts for other in seconds]
    for nats in (2.0, 4.0, 6.0):
        assert np.mean(np.array(found) >= nats) <= math.exp(-nats)
    assert max(found) < 20.0


KNOWN = frozenset({"ann", "known"})


@pytest.mark.parametrize(
    ("first", "again", "verdict"),
    [
        (ME, BOB, DuplicateKind.OURS),
        (BOB, BOB._replace(group_id=b"c"), DuplicateKind.COPY),
        (ANN, BOB, DuplicateKind.UNDECIDED),
        (ANN, BOB._replace(announced_at=1000.1 + ORDER_MARGIN_S), DuplicateKind.COPY),
        (ANN, BOB._replace(announced_at=999.0), DuplicateKind.UNDECIDED),  # a newcomer's word against a known peer
        (ANN, BOB._replace(announced_at=None), DuplicateKind.UNDECIDED),
        (ANN._replace(announced_at=None), BOB, DuplicateKind.UNDECIDED),
        (BOB, ANN._replace(announced_at=2000.0), DuplicateKind.UNDECIDED),  # a known peer after a newcomer
        (BOB, ANN, None),  # it was announced first and arrived last
        (ANN, Origin("known", b"k", 900.0), None),
        (ANN, Origin("known", b"k", 2000.0), DuplicateKind.UNDECIDED),
        (BOB, Origin("new", b"n", 1000.0), None),
        (BOB, Origin("new", b"n", 2000.0), DuplicateKind.UNDECIDED),
    ],
)
def test_only_certain_copies_are_charged(first, again, verdict):
    assert decide(Copy(first, True), again, own_id="me", is_known=KNOWN.__contains__) is verdict
    likely = decide(Copy(first, False), again, own_id="me", is_known=KNOWN.__contains__)
    assert likely is verdict or (verdict is DuplicateKind.COPY and first.sender != again.sender), (
        "false log-probs of the first sender charge no peer to which the text is likely"
    )


def new_nats(completions: list[SeenCompletion], known: list[SeenCompletion]) -> float:
    detector = DuplicateDetector("me")
    detector.remember(ANN, b"sum/1", known)
    nats = detector.new_nats(b"sum/1", completions)
    detector.find("bob", b"sum/1", completions)
    assert detector.new_nats(b"sum/1", completions) == nats, "also with the pairings of the search"
    return nats


def test_new_nats_counts_equal_completions_once_and_bounds_the_claim():
    one, other = text(10), text(4, nats=50.0)
    assert new_nats([one, one, other], []) == pytest.approx(18.0)
    assert new_nats([one, other], [one]) == pytest.approx(8.0)


def test_new_nats_counts_no_token_of_a_copied_run():
    answers = [text(6) for _ in range(12)]
    assert new_nats([*answers[:-1], changed(answers[-1], 2)], answers) == 0.0
    assert new_nats([changed(one, 2) for one in answers], answers) == 0.0, "any change makes one token"
    assert new_nats([inserted(one, 0) for one in answers], answers) == 0.0
    assert new_nats([changed(answers[0], 2, 3, 4)], answers) == pytest.approx(2.0)
    assert new_nats([text(6) for _ in range(12)], answers) == pytest.approx(
        72.0, abs=8
    )  # some tokens are equal by chance
    one = text(300)
    assert new_nats([changed(one, *range(100, 160))], [one]) == pytest.approx(59.0)
    assert new_nats([with_ids([*one.ids[200:].tolist(), *text(50).ids.tolist()])], [one]) == pytest.approx(49.0, abs=2)


def test_an_announcer_of_many_groups_displaces_only_its_own():
    announced = FirstAnnouncements(capacity=100)
    for number in range(10):
        announced.note(b"ann%d" % number, announcer="ann", at=float(number))
    for number in range(1000):
        announced.note(b"thief%d" % number, announcer="thief", at=100.0)
    announced.note(b"ann3", announcer="thief", at=200.0)
    assert [announced.at(b"ann%d" % number) for number in range(10)] == [float(number) for number in range(10)]
    assert announced.at(b"thief0") is None
    assert (announced.at(b"thief999"), len(announced._times)) == (100.0, 100)


def test_a_group_is_described_by_the_surprise_of_its_tokens_or_texts():
    identity = Identity.from_seed(b"1" * 32)
    group = make_group(identity, completions=(make_completion(*range(5)), make_completion(*range(2000))))
    short, long = describe(group)
    assert short.nats == pytest.approx(-group.completions[0].logprobs)
    assert len(long.ids) == len(long.nats) == 1024
    assert not short.is_text
    texts = replace(group, mean_logprobs=(-0.5, -2.0))
    assert all(one.is_text for one in describe(texts))
    assert [one.nats.mean() for one in describe(texts)] == pytest.approx([0.5, 2.0])


def restated(rng: np.random.Generator) -> SeenCompletion:
    """Return a completion that restates its problem, which is certain, and then reasons by itself."""
    ids = np.concatenate([np.arange(60), rng.integers(100, 40_000, 180)]).astype(np.int32)
    return seen(ids, np.repeat(np.array([0.01, 0.5], dtype=np.float32), [60, 180]))


def as_text(one: SeenCompletion) -> SeenCompletion:
    return seen(one.ids, np.full(len(one.ids), one.nats.mean(), dtype=np.float32), is_text=True)


def test_a_restated_problem_is_no_copy_in_a_group_sent_as_text():
    completions = [restated(RNG) for _ in range(12)]
    texts = [as_text(one) for one in completions]
    assert not found(completions, *[restated(RNG) for _ in range(12)])
    assert not found(texts)
    assert not found(texts, *[as_text(restated(RNG)) for _ in range(12)])
    assert not found([restated(RNG) for _ in range(12)], *texts)
    assert found([changed(one, 5, 100, -1) for one in texts], *texts), "whole texts are copies"


@pytest.mark.parametrize(
    ("num_exact", "verdict"), [(7, DuplicateKind.OURS), (3, DuplicateKind.OURS), (2, DuplicateKind.UNDECIDED)]
)
def test_copies_of_a_text_do_not_clear_a_group_with_too_many_exact_copies(num_exact, verdict):
    detector, ours, old = DuplicateDetector("me"), [text() for _ in range(8)], text()
    detector.remember(ME, b"sum/1", ours)
    detector.remember(BOB, b"sum/1", [as_text(old)])
    copies = [*ours[:num_exact], old, *(text() for _ in range(7 - num_exact))]
    copy = detector.find("bob", b"sum/1", copies)
    assert decide(copy, BOB._replace(group_id=b"c"), own_id="me", is_known=KNOWN.__contains__) is verdict


@pytest.mark.parametrize(("first", "again"), [(ME, BOB), (BOB, BOB), (ANN, BOB._replace(announced_at=2000.0))])
@pytest.mark.parametrize("which", ["first", "again"])
def test_no_copy_of_or_by_a_group_sent_as_text_is_charged(first, again, which):
    completion, detector = text(), DuplicateDetector("me")
    detector.remember(first, b"sum/1", [as_text(completion) if which == "first" else completion])
    copy = detector.find(again.sender, b"sum/1", [as_text(completion) if which == "again" else completion])
    assert decide(copy, again, own_id="me", is_known=KNOWN.__contains__) is DuplicateKind.UNDECIDED
