"""Copies are rejected only if chance is ruled out."""

from __future__ import annotations

import pytest

from ftis_node.swarm.reputation.duplicates import DuplicateDetector, DuplicateKind, DuplicateRules, SeenCompletion

RULES = DuplicateRules(min_tokens=8, max_share=0.25, max_kept=100)


def seen(text: str, *, num_tokens: int = 8, surprise: float = 30.0) -> SeenCompletion:
    return SeenCompletion(text.encode(), num_tokens, surprise)


def detector_with(*completions: SeenCompletion, sender: str = "ann") -> DuplicateDetector:
    detector = DuplicateDetector("me", RULES)
    detector.remember(sender, "sum/1", completions)
    return detector


@pytest.mark.parametrize(
    ("first", "copier", "found"),
    [
        ("ann", "bob", DuplicateKind.OTHERS),
        ("ann", "ann", DuplicateKind.OTHERS),
        ("me", "bob", DuplicateKind.OURS),
        ("ann", "me", None),
    ],
)
def test_a_copy_is_found_whoever_was_first(first: str, copier: str, found: DuplicateKind | None) -> None:
    detector = detector_with(seen("a"), seen("b"), sender=first)
    assert detector.judge(copier, "sum/1", [seen("a"), seen("x")]) is found


def test_who_was_first_stays_first() -> None:
    detector = detector_with(seen("a"), sender="me")
    detector.remember("bob", "sum/1", [seen("a"), seen("x"), seen("y"), seen("z")])  # few enough that it passed
    assert detector.judge("cat", "sum/1", [seen("a")]) is DuplicateKind.OURS


def test_one_of_four_may_be_equal_and_two_may_not() -> None:
    detector = detector_with(seen("a"), seen("b"))
    assert detector.judge("bob", "sum/1", [seen("a"), seen("x"), seen("y"), seen("z")]) is None
    assert detector.judge("bob", "sum/1", [seen("a"), seen("b"), seen("y"), seen("z")]) is DuplicateKind.OTHERS


def test_short_answers_never_count() -> None:
    short = [seen("7", num_tokens=7), seen("8", num_tokens=7)]
    assert detector_with(*short).judge("bob", "sum/1", short) is None


def test_what_surprises_nobody_never_counts_and_a_copy_cannot_claim_that() -> None:
    collapsed = [seen("a", surprise=19.0)] * 4
    assert detector_with(*collapsed).judge("bob", "sum/1", collapsed) is None
    assert detector_with(seen("a")).judge("bob", "sum/1", [seen("a", surprise=0.0)]) is DuplicateKind.OTHERS


def test_one_right_answer_many_times_is_a_copy_of_itself() -> None:
    assert detector_with().judge("bob", "sum/1", [seen("a")] * 4) is DuplicateKind.OTHERS


def test_another_prompt_is_another_text() -> None:
    assert detector_with(seen("a")).judge("bob", "sum/2", [seen("a")]) is None


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    detector = detector_with(*[seen(str(i)) for i in range(500)])
    assert len(detector) == 100
    assert detector.judge("bob", "sum/1", [seen("499")]) is DuplicateKind.OTHERS
    assert detector.judge("bob", "sum/1", [seen("0")]) is None
