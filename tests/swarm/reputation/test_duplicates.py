"""Copies are refused where chance is ruled out, and nowhere else."""

from __future__ import annotations

import pytest

from ftis_node.swarm.reputation.duplicates import DuplicateDetector, DuplicateKind, DuplicateRules, SeenCompletion

RULES = DuplicateRules(min_tokens=8, max_share=0.25, max_kept=100)


def told(text: str, *, num_tokens: int = 8, surprise: float = 30.0) -> SeenCompletion:
    return SeenCompletion(text.encode(), num_tokens, surprise)


def catalogue(*completions: SeenCompletion, sender: str = "ann") -> DuplicateDetector:
    copycats = DuplicateDetector("me", RULES)
    copycats.remember(sender, "sum/1", completions)
    return copycats


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
    copycats = catalogue(told("a"), told("b"), sender=first)
    assert copycats.judge(copier, "sum/1", [told("a"), told("x")]) is found


def test_who_was_first_stays_first() -> None:
    copycats = catalogue(told("a"), sender="me")
    copycats.remember("bob", "sum/1", [told("a"), told("x"), told("y"), told("z")])  # few enough that it passed
    assert copycats.judge("cat", "sum/1", [told("a")]) is DuplicateKind.OURS


def test_one_of_four_may_be_equal_and_two_may_not() -> None:
    copycats = catalogue(told("a"), told("b"))
    assert copycats.judge("bob", "sum/1", [told("a"), told("x"), told("y"), told("z")]) is None
    assert copycats.judge("bob", "sum/1", [told("a"), told("b"), told("y"), told("z")]) is DuplicateKind.OTHERS


def test_short_answers_never_count() -> None:
    short = [told("7", num_tokens=7), told("8", num_tokens=7)]
    assert catalogue(*short).judge("bob", "sum/1", short) is None


def test_what_surprises_nobody_never_counts_and_a_copy_cannot_claim_that() -> None:
    collapsed = [told("a", surprise=19.0)] * 4
    assert catalogue(*collapsed).judge("bob", "sum/1", collapsed) is None
    assert catalogue(told("a")).judge("bob", "sum/1", [told("a", surprise=0.0)]) is DuplicateKind.OTHERS


def test_one_right_answer_many_times_is_a_copy_of_itself() -> None:
    assert catalogue().judge("bob", "sum/1", [told("a")] * 4) is DuplicateKind.OTHERS


def test_another_prompt_is_another_text() -> None:
    assert catalogue(told("a")).judge("bob", "sum/2", [told("a")]) is None


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    copycats = catalogue(*[told(str(i)) for i in range(500)])
    assert len(copycats) == 100
    assert copycats.judge("bob", "sum/1", [told("499")]) is DuplicateKind.OTHERS
    assert copycats.judge("bob", "sum/1", [told("0")]) is None
