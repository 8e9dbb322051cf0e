"""Equal completions count as copies only if chance is ruled out."""

from __future__ import annotations

import numpy as np
import pytest

from ftis_node.config.limits import ValidationSection
from ftis_node.swarm.duplicates import DuplicateDetector, DuplicateKind, SeenCompletion

RULES = ValidationSection(duplicate_min_tokens=8, duplicate_max_fraction=0.25, duplicate_history_size=100)


def seen(text: str, *, surprise: float = 30.0, prompt: str = "sum/1") -> SeenCompletion:
    (completion,) = described([text.ljust(RULES.duplicate_min_tokens)], surprise=surprise, prompt=prompt)
    return completion


def described(texts: list[str], *, surprise: float = 30.0, prompt: str = "sum/1") -> list[SeenCompletion]:
    """Return the long completions among `texts`, with one token for each character."""
    ids = np.array([ord(letter) for text in texts for letter in text], dtype="<i4").tobytes()
    return DuplicateDetector("me", RULES).describe(
        prompt, ids, lengths=[len(text) for text in texts], surprises=[surprise] * len(texts)
    )


def detector_with(*completions: SeenCompletion, sender: str = "ann") -> DuplicateDetector:
    detector = DuplicateDetector("me", RULES)
    detector.remember(sender, completions)
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
def test_a_copy_is_found_for_each_first_sender(first: str, copier: str, found: DuplicateKind | None) -> None:
    detector = detector_with(seen("a"), seen("b"), sender=first)
    assert detector.judge(copier, [seen("a"), seen("x")]) is found


def test_the_first_sender_of_a_completion_remains_its_author() -> None:
    detector = detector_with(seen("a"), sender="me")
    detector.remember("bob", [seen("a"), seen("x"), seen("y"), seen("z")])  # too few copies to be rejected
    assert detector.judge("cat", [seen("a")]) is DuplicateKind.OURS


def test_one_equal_completion_of_four_is_allowed_and_two_are_not() -> None:
    detector = detector_with(seen("a"), seen("b"))
    assert detector.judge("bob", [seen("a"), seen("x"), seen("y"), seen("z")]) is None
    assert detector.judge("bob", [seen("a"), seen("b"), seen("y"), seen("z")]) is DuplicateKind.OTHERS


def test_short_completions_never_count() -> None:
    short = described(["1234567", "7654321"])
    assert detector_with(*short).judge("bob", short) is None


def test_only_the_long_completions_of_a_group_are_described() -> None:
    assert described(["7", "12345678", "", "long text"]) == [seen("12345678"), seen("long text")]


def test_probable_completions_never_count_and_a_copier_cannot_claim_probability() -> None:
    collapsed = [seen("a", surprise=19.0)] * 4
    assert detector_with(*collapsed).judge("bob", collapsed) is None
    assert detector_with(seen("a")).judge("bob", [seen("a", surprise=0.0)]) is DuplicateKind.OTHERS


def test_equal_completions_within_a_group_are_copies() -> None:
    assert detector_with().judge("bob", [seen("a")] * 4) is DuplicateKind.OTHERS


def test_equal_completions_of_different_prompts_are_no_copies() -> None:
    assert detector_with(seen("a")).judge("bob", [seen("a", prompt="sum/2")]) is None


def test_the_history_is_bounded_and_drops_the_oldest() -> None:
    detector = detector_with(*[seen(str(i)) for i in range(500)])
    assert len(detector) == 100
    assert detector.judge("bob", [seen("499")]) is DuplicateKind.OTHERS
    assert detector.judge("bob", [seen("0")]) is None
