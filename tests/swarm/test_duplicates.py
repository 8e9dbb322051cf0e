"""Equal and nearly equal completions count as copies only if chance is ruled out, and the first announcement counts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ftis_node.config.limits import ValidationSection
from ftis_node.records.identity import Identity
from ftis_node.swarm.duplicates import (
    MAX_PER_PROMPT,
    ORDER_MARGIN_S,
    Copy,
    DuplicateDetector,
    DuplicateKind,
    Origin,
    SeenCompletion,
    decide,
    describe,
    evidence,
    new_nats,
)
from tests.conftest import make_completion, make_group

RULES = ValidationSection(duplicate_min_tokens=8, duplicate_max_fraction=0.25, duplicate_history_size=100_000)
ANN, BOB, ME = Origin("ann", b"a", 1000.0), Origin("bob", b"b", 1001.0), Origin("me", b"m", 0.0)
RNG = np.random.default_rng(1)


def text(num_tokens: int = 44, *, nats: float = 1.0) -> SeenCompletion:
    """Return a completion of random tokens with this surprise of each."""
    return SeenCompletion(
        RNG.integers(0, 1000, num_tokens, dtype=np.int32), np.full(num_tokens, nats, dtype=np.float32)
    )


def with_ids(ids: list[int]) -> SeenCompletion:
    return SeenCompletion(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.float32))


def changed(completion: SeenCompletion, *places: int) -> SeenCompletion:
    ids = completion.ids.copy()
    ids[list(places)] += 1000
    return completion._replace(ids=ids)


def inserted(completion: SeenCompletion, *places: int) -> SeenCompletion:
    return with_ids(np.insert(completion.ids, list(places), 5000).tolist())


def cut(completion: SeenCompletion, begin: int, end: int) -> SeenCompletion:
    return SeenCompletion(completion.ids[begin:end], completion.nats[begin:end])


def found(copies: list[SeenCompletion], *known: SeenCompletion, origin: Origin = ANN, sender: str = "bob") -> bool:
    detector = DuplicateDetector("me", RULES)
    detector.remember(origin, "sum/1", known)
    return detector.find(sender, "sum/1", copies) is not None


@pytest.mark.parametrize(
    "edit",
    [
        lambda one: one,
        lambda one: changed(one, -1),
        lambda one: changed(one, 0),
        lambda one: changed(one, 20),
        lambda one: changed(one, 0, 15, 30),
        lambda one: changed(one, *range(10)),
        lambda one: inserted(one, 0),
        lambda one: inserted(one, *[0] * 12),
        lambda one: inserted(one, 22),
        lambda one: cut(one, 0, 30),
        lambda one: cut(one, 8, 44),
        lambda one: one._replace(nats=np.zeros(44, dtype=np.float32)),
    ],
    ids="equal last first middle three ten_first insert insert_12 insert_middle no_end no_begin no_surprise".split(),
)
def test_a_copy_with_a_few_other_tokens_is_a_copy(edit) -> None:  # type: ignore[no-untyped-def]
    texts = [text() for _ in range(4)]
    assert found([edit(one) for one in texts], *texts)
    assert not found([edit(one) for one in texts], *[text() for _ in range(4)])


def test_a_long_likely_text_with_eight_other_tokens_is_a_copy() -> None:
    texts = [text(300, nats=0.3) for _ in range(4)]
    assert found([changed(one, *range(30, 270, 30)) for one in texts], *texts)


def test_a_copy_is_found_for_each_first_sender() -> None:
    for origin, sender, is_found in ((ANN, "bob", True), (ANN, "ann", True), (ME, "bob", True), (ANN, "me", False)):
        texts = [text(), text()]
        assert found([texts[0], text()], *texts, origin=origin, sender=sender) is is_found


def test_the_first_sender_of_a_completion_remains_its_author() -> None:
    detector, texts = DuplicateDetector("me", RULES), [text() for _ in range(4)]
    detector.remember(ME, "sum/1", texts[:1])
    detector.remember(BOB, "sum/1", texts)  # too few copies to be rejected
    copy = detector.find("cat", "sum/1", texts[:1])
    assert copy is not None
    assert copy.first == ME


def test_one_equal_completion_of_four_is_allowed_and_two_are_not() -> None:
    a, b = text(), text()
    assert not found([a, text(), text(), text()], a, b)
    assert found([a, b, text(), text()], a, b)


def test_short_and_likely_completions_never_count() -> None:
    short, likely = [text(7, nats=9.0)] * 4, [text(44, nats=0.4)] * 4
    assert not found(short, *short)
    assert not found(likely, *likely)
    assert found([text()] * 4), "equal completions within a group"


def test_equal_completions_of_different_prompts_are_no_copies() -> None:
    detector, one = DuplicateDetector("me", RULES), text()
    detector.remember(ANN, "sum/1", [one])
    assert detector.find("bob", "sum/1", [one]) is not None
    assert detector.find("bob", "sum/2", [one]) is None


def test_the_history_is_bounded_and_drops_the_oldest() -> None:
    detector = DuplicateDetector("me", RULES)
    texts = [text(500) for _ in range(400)]
    for at, one in enumerate(texts):
        detector.remember(ANN, f"sum/{at}", [one])
    assert detector.num_tokens == 100_000
    assert detector.find("bob", "sum/399", [texts[399]]) is not None
    assert detector.find("bob", "sum/0", [texts[0]]) is None
    detector.remember(ANN, "one", [text(10) for _ in range(1000)])
    assert len(detector.known("one")) == MAX_PER_PROMPT


def test_a_forgotten_group_is_no_author() -> None:
    detector, texts = DuplicateDetector("me", RULES), [text(), text()]
    detector.remember(ANN, "sum/1", texts[:1])
    detector.remember(BOB, "sum/1", texts[1:])
    detector.forget(b"a", "sum/1")
    assert detector.num_tokens == 44
    assert detector.find("cat", "sum/1", texts[:1]) is None
    assert detector.find("cat", "sum/1", texts[1:]) is not None


@pytest.mark.parametrize(("num_words", "sharpness"), [(3, 1.0), (40, 1.0), (40, 3.0)])
def test_independent_samples_have_an_evidence_of_e_nats_in_at_most_e_to_the_minus_e_cases(
    num_words: int, sharpness: float
) -> None:
    """Of two policies that prefer the same texts, one more than the other, as two siblings in training."""
    weights = RNG.gumbel(size=(num_words, num_words)) * sharpness

    def sample(temperature: float) -> SeenCompletion:
        logprobs = weights / temperature
        logprobs -= np.logaddexp.reduce(logprobs, axis=1, keepdims=True)
        ids = [0]
        for _ in range(40):
            ids.append(int(np.argmax(logprobs[ids[-1]] + RNG.gumbel(size=num_words))))
        return SeenCompletion(np.array(ids[1:], dtype=np.int32), -logprobs[ids[:-1], ids[1:]].astype(np.float32))

    firsts, seconds = [sample(1.0) for _ in range(60)], [sample(0.7) for _ in range(60)]
    found = [evidence(one, other.ids, (0, -1, 1)) for one in firsts for other in seconds]
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
def test_only_certain_copies_are_charged(first: Origin, again: Origin, verdict: DuplicateKind) -> None:
    assert decide(Copy(first, True), again, own_id="me", is_known=KNOWN.__contains__) is verdict
    likely = decide(Copy(first, False), again, own_id="me", is_known=KNOWN.__contains__)
    assert likely is verdict or (verdict is DuplicateKind.COPY and first.sender != again.sender), (
        "false log-probs of the first sender charge no peer to which the text is likely"
    )


def test_new_nats_counts_equal_completions_once_and_bounds_the_claim() -> None:
    one, other = text(10), text(4, nats=50.0)
    assert new_nats([one, one, other], []) == pytest.approx(18.0)
    assert new_nats([one, other], [one]) == pytest.approx(8.0)


def test_a_group_is_described_by_the_surprise_of_its_tokens_or_texts() -> None:
    identity = Identity.from_seed(b"1" * 32)
    group = make_group(identity, completions=(make_completion(*range(5)), make_completion(*range(2000))))
    short, long = describe(group)
    assert short.nats == pytest.approx(-group.completions[0].logprobs)
    assert len(long.ids) == len(long.nats) == 1024
    texts = replace(group, mean_logprobs=(-0.5, -2.0))
    assert [one.nats.mean() for one in describe(texts)] == pytest.approx([0.5, 2.0])
